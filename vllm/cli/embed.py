"""Embed the texts of a file, by a model that embeds.

FILE is JSONL (a line is an object with a text field, or a string), CSV with a header, or Parquet. A row of the output
has the input's fields, embedding (a list of numbers) and num_prompt_tokens, or an error instead. --output ends in
.jsonl, .csv or .parquet.

What rows are made from is kept in .meta.json; the same command with --resume continues a run that was killed. With
--url a running server embeds, a request a text; with --backend ray, --replicas engines on a Ray cluster do, and
--output is a folder of parts.

example: vllm embed reviews.jsonl --model all-MiniLM-L6-v2 --output reviews.parquet
"""

from __future__ import annotations

import argparse

from vllm.cli.file_arguments import add_file_arguments, check_file_arguments, needs_ray
from vllm.engine.arg_utils import EngineArgs
from vllm.utils.flag_types import at_least

NAME = "embed"
HELP = "embed every text of a file"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    prompt = parser.add_mutually_exclusive_group()
    prompt.add_argument("--prompt", metavar="TEXT", help='put before each text, such as "query: "')
    prompt.add_argument("--prompt-name", metavar="NAME", help="the model's prompt of this name is put before each text")
    numbers = "so many of an embedding's first numbers, normalised anew (Matryoshka)"
    parser.add_argument("--dimensions", metavar="N", type=at_least(1), help=numbers)
    parser.add_argument("--no-normalize", action="store_true", help="leave embeddings as long as they are")
    longest = "longest text, -1 for the model's own; longer ones lose their end (default: they are errors)"
    parser.add_argument("--truncate-prompt-tokens", metavar="N", type=int, help=longest)
    output = "results, .jsonl, .csv or .parquet (default: <FILE's stem>.embeddings.jsonl)"
    add_file_arguments(parser, output)
    EngineArgs.add_cli_args(parser)


def run(args: argparse.Namespace) -> int:
    check_file_arguments(args)
    needs_ray(args)
    from vllm.scoring.pooled.task import EmbedTask
    from vllm.scoring.run import complete_file

    return complete_file(args, EmbedTask)
