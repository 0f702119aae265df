"""Score the texts of a file: how likely is each label to come next?

FILE is JSONL (a line is an object with a text field, or a string), CSV with a header, or Parquet. Every text is put in
the template, and the probability that the model gives to each label as its continuation is read.

A row of the output has, by label: probs (among the labels), logprobs, logits, ranks (1 is the likeliest token);
and label_mass (the probability of all labels together), prediction, num_prompt_tokens, or an error instead.
A label may have any number of tokens. If one has several, logprobs are those of whole labels, ranks those of their
first tokens, logits are null for the longer ones, and normalized_logprobs (a token's mean), token_logprobs and
token_ranks come along.

Rows are appended batch by batch. What they are made from is kept in OUTPUT.meta.json; the same command with --resume
continues a run that was killed: existing rows stay, and the output becomes that of a run that was never stopped.

With --url no model is loaded here: a running server scores, a request a text, --concurrency of them at once. While it
is overloaded or away requests are repeated for about a minute; the rows so far are kept for --resume.

With --backend ray, --replicas engines on a Ray cluster score. --output is then a folder of a file a batch of 256 texts,
part-00000000.jsonl and so on: together, in the order of their names, they are the output of a run without Ray.

As a teacher (--prompt-logprobs, --prompt-ids-field) rollouts are read instead of labels: --text-field holds a text or
token ids, and the model's readings of them are written as Parquet, to a folder of a file for each 16 rollouts.
--resume, --url and --backend ray work as they do for labels.

examples:
  vllm score reviews.jsonl --labels " positive" " negative"
  vllm score rollouts.parquet --text-field ids --prompt-ids-field topk --student-logprobs-field topk_logprobs
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from vllm.cli.file_arguments import add_file_arguments, check_file_arguments, needs_ray
from vllm.engine.arg_utils import EngineArgs
from vllm.exceptions import CliError

if TYPE_CHECKING:
    from vllm.scoring.task import Task

_LABEL_FLAGS = ("labels", "label_ids", "template", "template_file", "picture")
_TEACHER_FLAGS = (
    "prompt_logprobs", "prompt_ids_field", "prompt_start_field", "student_logprobs_field", "prompt_tables",
)  # fmt: skip
_TABLES = (
    "token_ids", "logprobs", "logits", "ranks", "own_logprobs", "own_logits", "own_ranks", "lse", "entropy",
    "reverse_kl", "forward_kl",
)  # fmt: skip

NAME = "score"
HELP = "read the probability of each label, or a teacher's readings, for every text of a file"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    labels = parser.add_mutually_exclusive_group()
    labels.add_argument("--labels", nargs="+", metavar="TEXT", help='labels, such as " positive" " negative"')
    labels.add_argument("--label-ids", nargs="+", metavar="ID", type=int, help="labels as token ids")
    _add_teacher_arguments(parser)
    template = parser.add_mutually_exclusive_group()
    prompt = (
        "the prompt, with {text} and other {fields}; \\n is a line break, {{ a brace.\n"
        "Left out: two examples of sentiment for positive/negative, a plain question otherwise"
    )
    template.add_argument("--template", metavar="TEXT", help=prompt)
    template.add_argument("--template-file", metavar="FILE", type=Path, help="the prompt from a file, as it is")
    output = "results, as JSONL (default: <FILE's stem>.scores.jsonl; a teacher's: a folder, <FILE's stem>.teacher)"
    picture = "chart, .png, .svg or .pdf (default: .png beside --output)"
    add_file_arguments(parser, output, picture)
    EngineArgs.add_cli_args(parser)


def _add_teacher_arguments(parser: argparse.ArgumentParser) -> None:
    teacher = parser.add_argument_group("teacher")
    topk = "read each position's K most likely tokens; 0: the rollouts' own tokens alone, -1: the vocabulary"
    teacher.add_argument("--prompt-logprobs", metavar="K", type=int, help=topk)
    ids = "field with a list of token ids to read for each of the last positions, or one list for all positions"
    teacher.add_argument("--prompt-ids-field", metavar="NAME", help=ids)
    start = "field with the first position whose logits are read (default: as there are lists of ids, or 0)"
    teacher.add_argument("--prompt-start-field", metavar="NAME", help=start)
    student = "field with a student's logprobs of these ids, for reverse_kl and forward_kl"
    teacher.add_argument("--student-logprobs-field", metavar="NAME", help=student)
    tables = "arrays to write, such as reverse_kl own_logprobs (default: all but entropy)"
    teacher.add_argument("--prompt-tables", nargs="+", metavar="NAME", choices=_TABLES, help=tables)


def run(args: argparse.Namespace) -> int:
    is_teacher = _is_teacher(args)
    check_file_arguments(args)
    if not is_teacher:
        _check_labels(args)
    needs_ray(args)
    from vllm.scoring.run import complete_file

    return complete_file(args, _teacher_task() if is_teacher else _label_task())


def _label_task() -> type[Task]:
    from vllm.scoring.labels.task import LabelTask

    return LabelTask


def _teacher_task() -> type[Task]:
    try:
        from vllm.scoring.teacher.task import TeacherTask
    except ImportError:
        raise CliError("--prompt-logprobs and --prompt-ids-field need pyarrow (pip install 'vllm[arrow]')") from None
    return TeacherTask


def _is_teacher(args: argparse.Namespace) -> bool:
    """Whether prompts are read instead of labels. CliError: neither is asked for, or flags of both are given."""
    given = {name: getattr(args, name) is not None for name in (*_LABEL_FLAGS, *_TEACHER_FLAGS)}
    is_teacher = given["prompt_logprobs"] or given["prompt_ids_field"]
    if not is_teacher and not given["labels"] and not given["label_ids"]:
        raise CliError("one of --labels, --label-ids, --prompt-logprobs, --prompt-ids-field is required")
    of, others = ("readings of prompts", _LABEL_FLAGS) if is_teacher else ("labels", _TEACHER_FLAGS)
    for name in ("image_field", "video_field"):
        if is_teacher and getattr(args, name) is not None:
            flag = f"--{name.replace('_', '-')}"
            raise CliError(f"{flag} has no meaning for readings of prompts: LLM.generate takes multi_modal_data")
    for name in others:
        if given[name]:
            raise CliError(f"--{name.replace('_', '-')} has no meaning for {of}")
    if given["student_logprobs_field"] and not given["prompt_ids_field"]:
        raise CliError("--student-logprobs-field needs --prompt-ids-field, the ids that these are the logprobs of")
    return is_teacher


def _check_labels(args: argparse.Namespace) -> None:
    flag, values = ("--labels", args.labels) if args.labels is not None else ("--label-ids", args.label_ids)
    for i, value in enumerate(values):
        if value in values[:i]:
            raise CliError(f"{flag}: {value!r} is there twice")
