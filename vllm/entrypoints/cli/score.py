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

from vllm.engine.arg_utils import EngineArgs
from vllm.entrypoints.cli.generation import add_server_arguments, check_server_arguments
from vllm.exceptions import CliError
from vllm.utils.flag_types import at_least
from vllm.utils.ray_utils import import_ray_for

NAME = "score"
HELP = "read the probability of each label for every text of a file"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("file", metavar="FILE", type=Path, help="the texts: .csv, .parquet, or else JSONL")
    labels = parser.add_mutually_exclusive_group(required=True)
    labels.add_argument("--labels", nargs="+", metavar="TEXT", help='labels, such as " positive" " negative"')
    labels.add_argument("--label-ids", nargs="+", metavar="ID", type=int, help="labels as token ids")
    field = "field that holds the text (default: text)"
    parser.add_argument("--text-field", default="text", metavar="NAME", help=field)
    template = parser.add_mutually_exclusive_group()
    prompt = (
        "the prompt, with {text} and other {fields}; \\n is a line break, {{ a brace.\n"
        "Left out: two examples of sentiment for positive/negative, a plain question otherwise"
    )
    template.add_argument("--template", metavar="TEXT", help=prompt)
    template.add_argument("--template-file", metavar="FILE", type=Path, help="the prompt from a file, as it is")
    output = "results, as JSONL (default: <FILE's stem>.scores.jsonl)"
    parser.add_argument("--output", metavar="FILE", type=Path, help=output)
    existing = parser.add_mutually_exclusive_group()
    resume = "keep the rows that --output has and score the other texts"
    existing.add_argument("--resume", action="store_true", help=resume)
    existing.add_argument("--overwrite", action="store_true", help="replace an --output that exists")
    picture = parser.add_mutually_exclusive_group()
    chart = "chart, .png, .svg or .pdf (default: .png beside --output)"
    picture.add_argument("--picture", metavar="FILE", type=Path, help=chart)
    picture.add_argument("--no-picture", action="store_true", help="draw none")
    parser.add_argument("--limit", metavar="N", type=int, help="score the first N texts only")
    parser.add_argument("--quiet", action="store_true", help="print nothing but errors and warnings")
    server = add_server_arguments(parser)
    server.add_argument("--concurrency", metavar="N", type=at_least(1), help="texts at once (default: 16)")
    cluster = parser.add_argument_group("ray")
    backend = "ray: engines on a Ray cluster instead of one in this process"
    cluster.add_argument("--backend", choices=("ray",), help=backend)
    cluster.add_argument("--replicas", metavar="R", type=at_least(1), help="engines (default: 1)")
    cpus = "CPUs of each engine (default: all there is room for)"
    cluster.add_argument("--replica-cpus", metavar="N", type=at_least(1), help=cpus)
    address = "the cluster, as HOST:PORT or auto (default: RAY_ADDRESS if it is set, or else one on this machine alone)"
    cluster.add_argument("--ray-address", metavar="ADDRESS", help=address)
    form = "of the parts in --output (default: jsonl)"
    cluster.add_argument("--output-format", choices=("jsonl", "csv", "parquet"), help=form)
    EngineArgs.add_cli_args(parser)


def run(args: argparse.Namespace) -> int:
    _check_arguments(args)
    if args.backend is None:
        from vllm.scoring.run import score_file

        return score_file(args)
    try:
        import_ray_for(args.ray_address)
        from vllm.scoring.ray_backend import score_file_on_ray
    except ImportError as error:
        raise CliError(f"--backend ray: {error}") from None
    return score_file_on_ray(args)


def _check_arguments(args: argparse.Namespace) -> None:
    check_server_arguments(args, "concurrency")
    if args.backend is None:
        for name in ("replicas", "replica_cpus", "ray_address", "output_format"):
            if getattr(args, name) is not None:
                raise CliError(f"--{name.replace('_', '-')} needs --backend ray")
    else:
        for name, reason in (("url", "a server scores by itself"), ("picture", "there is no picture of parts")):
            if getattr(args, name) is not None:
                raise CliError(f"--{name} and --backend ray exclude each other: {reason}")
    if args.limit is not None and args.limit < 1:
        raise CliError(f"--limit must be at least 1, got {args.limit}")
    flag, values = ("--labels", args.labels) if args.labels is not None else ("--label-ids", args.label_ids)
    for i, value in enumerate(values):
        if value in values[:i]:
            raise CliError(f"{flag}: {value!r} is there twice")
