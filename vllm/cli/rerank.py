"""Score how well the documents of a file answer a query: by a generating model, a cross-encoder or embeddings.

FILE is JSONL (a line is an object with a text field, or a string), CSV with a header, or Parquet; its texts are the
documents. --query is of all of them; without it each row has its own in the field that --query-field names. A row of
the output has the input's fields, score and num_prompt_tokens, or an error instead. --output ends in .jsonl, .csv or
.parquet. The best rows are printed.

A generating model answers the question of --score-template (docs/rerank_and_embed.md), and the score is the probability
of its positive answer.

What rows are made from is kept in .meta.json; the same command with --resume continues a run that was killed. With
--url a running server scores, a request a row; with --backend ray, --replicas engines on a Ray cluster do, and --output
is a folder of parts.

example: vllm rerank passages.jsonl --query "Where is the stop?" --model bge-reranker-base --output ranked.parquet
"""

from __future__ import annotations

import argparse

from vllm.cli.file_arguments import add_file_arguments, check_file_arguments, needs_ray
from vllm.engine.arg_utils import EngineArgs
from vllm.utils.flag_types import at_least

NAME = "rerank"
HELP = "score how well every document of a file answers a query"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--query", metavar="TEXT", help="query of all documents")
    parser.add_argument(
        "--query-field", metavar="NAME", default="query", help="field of each row's own (default: query)"
    )
    template = "plain, qwen3-reranker, bge-reranker-v2-gemma, mxbai-rerank-v2, none, or a file of Jinja"
    parser.add_argument("--score-template", metavar="TEMPLATE", help=template)
    labels = "the answers that are read, in place of the template's"
    parser.add_argument("--score-labels", nargs=2, metavar=("POSITIVE", "NEGATIVE"), help=labels)
    parser.add_argument("--instruction", metavar="TEXT", help="what the query is for, in templates that ask for it")
    cut = "longest document; longer ones lose their end"
    parser.add_argument("--max-tokens-per-doc", metavar="N", type=at_least(1), help=cut)
    longest = "longest prompt, -1 for the context; longer documents lose their end (default: they are errors)"
    parser.add_argument("--truncate-prompt-tokens", metavar="N", type=int, help=longest)
    add_file_arguments(parser, "results, .jsonl, .csv or .parquet (default: <FILE's stem>.ranked.jsonl)")
    EngineArgs.add_cli_args(parser)


def run(args: argparse.Namespace) -> int:
    check_file_arguments(args)
    needs_ray(args)
    from vllm.scoring.pooled.task import RerankTask
    from vllm.scoring.run import complete_file

    return complete_file(args, RerankTask)
