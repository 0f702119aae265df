"""Compare models on your own rows: how far is each candidate from the reference, and is a cheaper one good enough?

ROWS is JSONL (a line is an object with a text field, or a string), CSV with a header, Parquet, or a folder of .txt and
.md files. What is read of each: the probabilities of --labels, the answers to --questions, scores of documents (--query
or --rerank), vectors (--embed), or, with --text-field alone, every position of the text over the whole vocabulary.

A model is MODEL[:dtype[:quantization]], and engine arguments may follow as ,name=value. A candidate may also be a dtype
(bfloat16) or quantization=int8 alone, of the reference's model; adapter=FOLDER, the reference with a LoRA adapter;
reference, which is read again in other company (steps, pieces, no cache) and has to give the same; or the URL of a
running server. `embedded` is the embedded small model.

Each model is loaded in a process of its own, one after the other. Readings stay in --readings: a later audit of the
same rows reads the reference from there, and the same command continues one that was killed.

--budget, such as flips<=0.5% or kl<=0.01, names the cheapest candidate that keeps it with 95 % confidence. The exit
code is 1 if none does.

examples:
  vllm audit reviews.jsonl --labels " positive" " negative" --reference FOLDER:float32 --candidate FOLDER:bfloat16
  vllm audit texts --text-field text --reference FOLDER:float32 --candidate model.Q4_K_M.gguf --output audit.json
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import fields
from pathlib import Path
from typing import Any

from vllm.cli.file_arguments import needs_ray
from vllm.engine.arg_utils import EngineArgs
from vllm.exceptions import CliError
from vllm.utils.flag_types import at_least

NAME = "audit"
HELP = "compare models' readings of your own rows with a reference's"

_OF_MODELS = ("model", "dtype", "quantization")
_KINDS = {
    "labels": ("template", "template_file"),
    "questions": ("read",),
    "rerank": ("query_field", "score_template", "score_labels", "instruction"),
    "embed": ("prompt", "dimensions"),
    "text": ("chunk_tokens",),
}
_PASSED = (
    "labels", "label_ids", "questions", "query", "limit", "backend", "replicas", "replica_cpus", "ray_address",
    "api_key", "timeout", "concurrency", "truncate_prompt_tokens",
)  # fmt: skip


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("rows", metavar="ROWS", type=Path, help="the rows: .csv, .parquet, a folder, or else JSONL")
    model = "MODEL[:dtype[:quantization]][,name=value...]"
    parser.add_argument("--reference", metavar="MODEL", required=True, help=f"what the others are held to: {model}")
    candidate = (
        f"a model to compare, or several times: {model}, a dtype, quantization=..., adapter=..., reference, a URL"
    )
    parser.add_argument("--candidate", metavar="MODEL", action="append", required=True, help=candidate)
    asked = parser.add_mutually_exclusive_group()
    asked.add_argument("--labels", nargs="+", metavar="TEXT", help='labels, such as " positive" " negative"')
    asked.add_argument("--label-ids", nargs="+", metavar="ID", type=int, help="labels as token ids")
    asked.add_argument("--questions", metavar="FILE", type=Path, help="JSON file of questions, as of vllm decide")
    asked.add_argument("--query", metavar="TEXT", help="query of all documents, which are scored")
    asked.add_argument("--rerank", action="store_true", help="score documents, each for its row's own query")
    asked.add_argument("--embed", action="store_true", help="compare the vectors of the texts")
    parser.add_argument("--text-field", metavar="NAME", help="field that holds the text (default: text)")
    template = parser.add_mutually_exclusive_group()
    prompt = "the prompt of labels, with {text} and other {fields}, as of vllm score"
    template.add_argument("--template", metavar="TEXT", help=prompt)
    template.add_argument("--template-file", metavar="FILE", type=Path, help="the prompt from a file, as it is")
    parser.add_argument("--read", choices=("auto", "labels", "values"), help="how questions are read: see vllm decide")
    parser.add_argument("--query-field", metavar="NAME", help="field of each row's own query (default: query)")
    parser.add_argument("--score-template", metavar="TEMPLATE", help="how documents are scored: see vllm rerank")
    parser.add_argument("--score-labels", nargs=2, metavar=("POSITIVE", "NEGATIVE"), help="the answers that are read")
    parser.add_argument("--instruction", metavar="TEXT", help="what the query is for")
    parser.add_argument("--prompt", metavar="TEXT", help="text before each one that is embedded")
    parser.add_argument("--dimensions", metavar="N", type=at_least(1), help="numbers of a vector")
    longest = "longest prompt of questions, documents and vectors; longer ones are cut (default: they are errors)"
    parser.add_argument("--truncate-prompt-tokens", metavar="N", type=int, help=longest)
    pieces = "read texts in pieces of N tokens, the second half of each, as llama.cpp's perplexity does"
    parser.add_argument("--chunk-tokens", metavar="N", type=at_least(4), help=pieces)
    known = "field of the known label (default: label, where it is there); of questions, QUESTION=FIELD"
    parser.add_argument("--gold", nargs="+", metavar="FIELD", help=known)
    parser.add_argument("--by", nargs="+", metavar="FIELD", default=[], help="group the rows by these fields")
    parser.add_argument("--budget", metavar="LIMIT", help="flips<=0.5%%, kl<=0.01 or tv<=0.02")
    parser.add_argument("--readings", metavar="FOLDER", type=Path, help="readings (default: <ROWS's stem>.audit)")
    parser.add_argument("--overwrite", action="store_true", help="read all models anew")
    parser.add_argument("--output", metavar="FILE", type=Path, help="results, as JSON")
    parser.add_argument("--page", metavar="FILE", type=Path, help="results with plots, as a page of HTML")
    parser.add_argument("--limit", metavar="N", type=at_least(1), help="read the first N rows only")
    parser.add_argument("--quiet", action="store_true", help="print nothing but errors and warnings")
    server = parser.add_argument_group("server")
    server.add_argument("--api-key", metavar="KEY", help="key of a candidate that is a URL")
    server.add_argument("--timeout", metavar="SECONDS", type=float, help="longest wait for anything from a server")
    server.add_argument("--concurrency", metavar="N", type=at_least(1), help="texts at once (default: 16)")
    cluster = parser.add_argument_group("ray")
    cluster.add_argument("--backend", choices=("ray",), help="ray: read with engines on a Ray cluster")
    cluster.add_argument("--replicas", metavar="R", type=at_least(1), help="engines (default: 1)")
    cluster.add_argument("--replica-cpus", metavar="N", type=at_least(1), help="CPUs of each engine")
    cluster.add_argument("--ray-address", metavar="ADDRESS", help="the cluster, as HOST:PORT or auto")
    EngineArgs.add_cli_args(parser)


def run(args: argparse.Namespace) -> int:
    kind = _kind(args)
    engine = _engine(args)
    _check_paths(args)
    needs_ray(args)
    from vllm.auditing.audits import Options
    from vllm.auditing.audits import run as run_audit
    from vllm.auditing.report import audit_table

    found = run_audit(
        Options(
            rows=args.rows,
            kind=kind,
            reference=args.reference,
            candidates=args.candidate,
            text_field=args.text_field or "text",
            gold=args.gold,
            by=args.by,
            budget=args.budget,
            readings=args.readings,
            overwrite=args.overwrite,
            quiet=args.quiet,
            args=_task_args(args, kind),
            engine=engine,
        )
    )
    if args.output is not None:
        found.save(args.output)
    if args.page is not None:
        _save_page(found, args.page)
    if not args.quiet:
        print(audit_table(found))
    for each in (found.reference, *found.candidates):
        if each.failed:
            print(f"vllm audit: {each.name}: {each.failed} rows failed, first {each.failure}", file=sys.stderr)
    for each in found.candidates:
        if each.missing is not None:
            _print_missing(each.name, each.missing)
    if found.budget is not None and found.budget.cheapest is None:
        return 1
    return 1 if any(not each.rows for each in found.candidates) else 0


def _print_missing(name: str, missing: Any) -> None:
    labels = ", ".join(f"{label!r} in {count}" for label, count in missing.labels.items() if count)
    lacks = f"{name}: {missing.rows} rows lack labels, as the server gives its likeliest tokens alone ({labels})"
    print(f"vllm audit: {lacks}; they are not compared, and {missing.flips} of them flip", file=sys.stderr)


def _save_page(found: Any, path: Path) -> None:
    from vllm.auditing.page import save_page

    try:
        save_page(found, path)
    except ImportError:
        raise CliError("--page needs matplotlib (pip install 'vllm[plot]')") from None


def _kind(args: argparse.Namespace) -> str:
    """CliError: nothing is asked, or flags of something else are given."""
    if args.labels or args.label_ids:
        kind = "labels"
    elif args.questions is not None:
        kind = "questions"
    elif args.query is not None or args.rerank:
        kind = "rerank"
    elif args.embed:
        kind = "embed"
    elif args.text_field is not None:
        kind = "text"
    else:
        raise CliError(
            "one of --labels, --label-ids, --questions, --query, --rerank, --embed, --text-field is required"
        )
    for of, names in _KINDS.items():
        for name in names:
            if of != kind and getattr(args, name) is not None:
                raise CliError(f"--{name.replace('_', '-')} has no meaning for {kind}")
    if kind in ("labels", "text") and args.truncate_prompt_tokens is not None:
        raise CliError(f"--truncate-prompt-tokens has no meaning for {kind}")
    if kind not in ("labels", "questions"):
        for name in ("gold", "by"):
            if getattr(args, name):
                raise CliError(f"--{name} has no meaning for {kind}")
    if kind == "labels" and len(args.gold or ()) > 1:
        raise CliError("--gold: labels have one field")
    given = args.labels or args.label_ids or ()
    for place, value in enumerate(given):
        if value in given[:place]:
            raise CliError(f"--labels: {value!r} is there twice")
    if args.backend is None:
        for name in ("replicas", "replica_cpus", "ray_address"):
            if getattr(args, name) is not None:
                raise CliError(f"--{name.replace('_', '-')} needs --backend ray")
    return kind


def _engine(args: argparse.Namespace) -> dict[str, Any]:
    """The engine arguments of all models. CliError: one that is each model's own."""
    engine = EngineArgs.from_cli_args(args)
    changed = {
        each.name: getattr(engine, each.name)
        for each in fields(EngineArgs)
        if getattr(engine, each.name) != getattr(EngineArgs(), each.name)
    }
    for name in _OF_MODELS:
        if name in changed:
            raise CliError(f"--{name} is each model's own: write --reference MODEL[:dtype[:quantization]]")
    return changed


def _check_paths(args: argparse.Namespace) -> None:
    if not args.rows.exists():
        raise CliError(f"cannot read {args.rows}: No such file or directory")
    for flag in ("output", "page"):
        path = getattr(args, flag)
        if path is None:
            continue
        if not path.parent.is_dir():
            raise CliError(f"--{flag}: there is no folder {path.parent}")
        if path.is_dir():
            raise CliError(f"--{flag} {path} is a folder")
        if path.resolve() == args.rows.resolve():
            raise CliError(f"--{flag} {path} would overwrite ROWS")
    if args.output is not None and args.page is not None and args.output.resolve() == args.page.resolve():
        raise CliError("--page would overwrite --output")


def _task_args(args: argparse.Namespace, kind: str) -> dict[str, Any]:
    names = (*_PASSED, *_KINDS[kind])
    return {name: getattr(args, name) for name in names if getattr(args, name) is not None}
