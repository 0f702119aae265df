"""Measure an engine on fixed work; one JSON line a row on stdout, progress on stderr.

    python benchmarks/engine.py                       # this package on the embedded model
    python benchmarks/engine.py --model FOLDER
    python benchmarks/engine.py --model FOLDER --engine transformers
    ELSEWHERE/bin/python benchmarks/engine.py --model FOLDER --engine vllm      # upstream's package

`benchmarks/compare.py` makes a table of the lines; benchmarks/README.md says what each row is.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import shlex
import statistics
import sys
import time
from pathlib import Path
from typing import Any

from adapters import ENGINES, Adapter, make_adapter, prepare_process
from machine import describe_machine, usable_cores
from startup import time_startup
from workloads import ROWS, make_workload


def main() -> None:
    """Run the rows that were asked for."""
    args = _parse_args()
    prepare_process(args.engine, args.threads)
    printer = _Printer(args)
    if "startup" in args.rows:
        # Before the engine is loaded here, so that nothing competes for memory and cores.
        how = (args.engine, args.model, args.dtype, args.threads, args.quantization)
        starts = [time_startup(*how) for _ in range(args.repeats)]
        seconds = [start.seconds for start in starts]
        printer.line("startup", starts[0].version, seconds, seconds, "s", check=statistics.mean(starts[0].score))
    rows = [row for row in ROWS if row in args.rows and row != "startup"]
    if rows:
        _say(f"loading {args.engine}")
        adapter = make_adapter(args.engine, args.model, args.dtype, args.quantization)
        for row in rows:
            _measure(row, adapter, args, printer)


def _measure(row: str, adapter: Adapter, args: argparse.Namespace, printer: _Printer) -> None:
    # The warm-up has the row's full shapes: they decide what the engines build and keep at first use.
    adapter.run(make_workload(row, -1, args.scale))
    seconds: list[float] = []
    check: float | None = None
    for repeat in range(args.repeats):
        work = make_workload(row, repeat, args.scale)
        began = time.perf_counter()
        readings = adapter.run(work)
        seconds.append(time.perf_counter() - began)
        if repeat == 0 and readings is not None:
            check = float(readings[:, 0].mean())
    values = [work.amount / one for one in seconds]
    printer.line(row, adapter.version, seconds, values, work.unit, check, adapter.notes.get(row))


class _Printer:
    """The JSON lines. It takes stdout for itself: what the engines write there goes to stderr."""

    def __init__(self, args: argparse.Namespace) -> None:
        self._args = args
        self._machine = describe_machine()
        self._file = os.fdopen(os.dup(sys.stdout.fileno()), "w", encoding="utf-8")
        os.dup2(sys.stderr.fileno(), sys.stdout.fileno())

    def line(
        self,
        row: str,
        version: str,
        seconds: list[float],
        values: list[float],
        unit: str,
        check: float | None,
        note: str | None = None,
    ) -> None:
        """One row: `values` one a repeat like `seconds`; `check` the mean logprob at the first position."""
        args = self._args
        fields: dict[str, Any] = {
            "row": row,
            "engine": args.engine,
            "version": version,
            "model": Path(args.model).stem if args.model else "embedded",
            "dtype": args.dtype,
            "quantization": args.quantization,
            "threads": args.threads,
            "value": round(min(values) if unit == "s" else max(values), 3),
            "median": round(statistics.median(values), 3),
            "unit": unit,
            "seconds": round(min(seconds), 4),
            "repeats": len(seconds),
            "check": None if check is None else round(check, 4),
            "note": note,
            "scale": args.scale,
            "machine": self._machine,
            "date": datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ"),
            "command": args.command,
        }
        scaled = "" if args.scale == 1 else f", work scaled by {args.scale:g}"
        _say(f"{row}: {fields['value']} {unit} (median {fields['median']} of {len(seconds)}{scaled})")
        print(json.dumps(fields), file=self._file, flush=True)


def _command(args: argparse.Namespace) -> str:
    """The command line, the model by its name alone: where it lies is the machine's own affair."""
    words = [word.replace(args.model, Path(args.model).name) if args.model else word for word in sys.argv[1:]]
    return shlex.join(["python", "benchmarks/engine.py", *words])


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _rows(text: str) -> list[str]:
    rows = text.split(",")
    unknown = [row for row in rows if row not in ROWS]
    if unknown:
        raise argparse.ArgumentTypeError(f"unknown row {unknown[0]!r}; known: {', '.join(ROWS)}")
    return rows


def _parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Measure an engine on fixed work, one JSON line a row.")
    parser.add_argument("--engine", choices=ENGINES, default="ours", help="default: %(default)s")
    parser.add_argument("--model", help="folder or .gguf; default: the embedded model (--engine ours alone)")
    parser.add_argument("--rows", type=_rows, default=list(ROWS), help=f"some of {','.join(ROWS)}; default: all")
    parser.add_argument("--dtype", default="bfloat16", help="default: %(default)s")
    parser.add_argument("--quantization", help="of --engine ours and vllm: int8; default: none")
    parser.add_argument("--repeats", type=int, default=3, help="measured runs a row (default: %(default)s)")
    parser.add_argument("--threads", type=int, default=usable_cores(), help="default: all usable cores")
    parser.add_argument("--scale", type=float, default=1.0, help="factor on the amount of work, for trying out")
    args = parser.parse_args()
    for name in ("repeats", "threads", "scale"):
        if getattr(args, name) <= 0:
            parser.error(f"--{name} must be above 0, got {getattr(args, name)}")
    if args.quantization and args.engine == "transformers":
        parser.error("--quantization is of --engine ours and vllm")
    args.command = _command(args)
    if args.model and Path(args.model).exists():
        args.model = str(Path(args.model).resolve())
    return args


if __name__ == "__main__":
    main()
