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

example: vllm score reviews.jsonl --labels " positive" " negative"
"""

from __future__ import annotations

import argparse
from pathlib import Path

from vllm.cli.file_arguments import add_file_arguments, check_file_arguments, needs_ray
from vllm.engine.arg_utils import EngineArgs
from vllm.exceptions import CliError

NAME = "score"
HELP = "read the probability of each label for every text of a file"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    labels = parser.add_mutually_exclusive_group(required=True)
    labels.add_argument("--labels", nargs="+", metavar="TEXT", help='labels, such as " positive" " negative"')
    labels.add_argument("--label-ids", nargs="+", metavar="ID", type=int, help="labels as token ids")
    template = parser.add_mutually_exclusive_group()
    prompt = (
        "the prompt, with {text} and other {fields}; \\n is a line break, {{ a brace.\n"
        "Left out: two examples of sentiment for positive/negative, a plain question otherwise"
    )
    template.add_argument("--template", metavar="TEXT", help=prompt)
    template.add_argument("--template-file", metavar="FILE", type=Path, help="the prompt from a file, as it is")
    output = "results, as JSONL (default: <FILE's stem>.scores.jsonl)"
    picture = "chart, .png, .svg or .pdf (default: .png beside --output)"
    add_file_arguments(parser, output, picture)
    EngineArgs.add_cli_args(parser)


def run(args: argparse.Namespace) -> int:
    _check_arguments(args)
    needs_ray(args)
    from vllm.scoring.labels.task import LabelTask
    from vllm.scoring.run import complete_file

    return complete_file(args, LabelTask)


def _check_arguments(args: argparse.Namespace) -> None:
    check_file_arguments(args)
    flag, values = ("--labels", args.labels) if args.labels is not None else ("--label-ids", args.label_ids)
    for i, value in enumerate(values):
        if value in values[:i]:
            raise CliError(f"{flag}: {value!r} is there twice")
