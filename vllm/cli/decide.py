"""Answer typed questions about the texts of a file, by the exact probabilities of their options.

FILE is JSONL (a line is an object with a text field, or a string), CSV with a header, or Parquet. --questions is a JSON
file: a list of the question objects of POST /v1/decisions (type predicate, choice or score), each with a name.

A row of the output has the input's fields and, by question, `answers`: type (or refusal), prediction, confidence or
score; by option probabilities (calibrated, if there is a calibration), raw_probabilities, logprobs and ranks (1 is the
likeliest token); label_mass, argmax_is_label; or an error instead. --output ends in .jsonl, .csv (a column a field:
QUESTION.prediction ...) or .parquet.

--gold QUESTION=COLUMN (or COLUMN, of a single question) compares the answers with known ones: accuracy, macro F1, Brier
score, log loss, expected calibration error and confusion matrix are printed and written beside --output, as
.evaluation.json, with a reliability diagram. --fit-calibration fits temperature and biases on them: it shows the error
before and after on rows that the fit has not seen, and then fits on all rows. --calibration applies such a file.

What rows are made from is kept in .meta.json; the same command with --resume continues a run that was killed. With
--url a running server answers, a request a text; with --backend ray, --replicas engines on a Ray cluster do, and
--output is a folder of parts.

example: vllm decide reviews.jsonl --questions questions.json --gold label --output decisions.parquet
"""

from __future__ import annotations

import argparse
from pathlib import Path

from vllm.cli.file_arguments import add_file_arguments, check_file_arguments, needs_ray
from vllm.engine.arg_utils import EngineArgs
from vllm.exceptions import CliError
from vllm.utils.flag_types import at_least

NAME = "decide"
HELP = "answer typed questions about every text of a file"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    questions = "JSON file of the questions"
    parser.add_argument("--questions", metavar="FILE", type=Path, required=True, help=questions)
    known = "columns of known answers; COLUMN alone if there is one question"
    parser.add_argument("--gold", nargs="+", metavar="QUESTION=COLUMN", help=known)
    calibration = parser.add_mutually_exclusive_group()
    calibration.add_argument(
        "--calibration", metavar="FILE", type=Path, help="calibrate the probabilities by this file"
    )
    fit = "write a calibration fitted on the known answers"
    calibration.add_argument("--fit-calibration", metavar="FILE", type=Path, help=fit)
    read = "labels: letters that stand for the options; values: the options' own texts (default: as the model's size)"
    parser.add_argument("--read", choices=("auto", "labels", "values"), help=read)
    orders = "orders of the options to average over (default: 1)"
    parser.add_argument("--permutations", metavar="K", type=at_least(1), default=1, help=orders)
    mass = "refuse a question whose options have less probability together (default: 0)"
    parser.add_argument("--min-label-mass", metavar="P", type=float, default=0.0, help=mass)
    longest = "longest prompt, -1 for the context; longer texts lose their beginning (default: they are errors)"
    parser.add_argument("--truncate-prompt-tokens", metavar="N", type=int, help=longest)
    output = "results, .jsonl, .csv or .parquet (default: <FILE's stem>.decisions.jsonl)"
    picture = "reliability diagram with --gold, .png, .svg or .pdf (default: .png beside --output)"
    add_file_arguments(parser, output, picture)
    EngineArgs.add_cli_args(parser)


def run(args: argparse.Namespace) -> int:
    _check_arguments(args)
    needs_ray(args)
    from vllm.scoring.decide.task import DecideTask
    from vllm.scoring.run import complete_file

    return complete_file(args, DecideTask)


def _check_arguments(args: argparse.Namespace) -> None:
    check_file_arguments(args)
    if args.gold is None:
        for name in ("fit_calibration", "picture"):
            if getattr(args, name) is not None:
                raise CliError(f"--{name.replace('_', '-')} needs --gold")
    elif args.backend is not None:
        raise CliError(
            "--gold and --backend ray exclude each other: measures are of a run in this process, or with --url"
        )
