"""Engines side by side, in one run on one machine: the same work, the same cores, in turns.

    python benchmarks/compare.py --quick                              # a minute, to try it out
    python benchmarks/compare.py                                      # this package alone, embedded model
    python benchmarks/compare.py --model FOLDER --upstream ENVIRONMENT --transformers --profile
    python benchmarks/compare.py --from results/compare.json --docs   # tables of an earlier run

Writes compare.json, compare.md, compare.svg and the engines' logs to --output, the tables to stdout. Definitions of the
rows: benchmarks/README.md; method: docs/performance.md.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shlex
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

from bounds import Bound, ModelShape, Rates, count_work, make_bound, rates_from_json, rates_to_json
from common import describe_machine, say, some_of, utc_now
from engines import Engine, find_python
from report import DOCUMENT, draw_chart, find_warnings, make_tables, write_section
from turns import Turns
from workloads import ALL_ROWS, LONG_ROWS, ROWS, WORK_ROWS, EngineOptions, make_workload

_HERE = Path(__file__).resolve().parent


def main() -> None:
    """Measure, or read a result, and report."""
    args = _parse_args()
    # An exception, so that the engines' processes are ended, too.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("terminated"))
    result = json.loads(args.read.read_text(encoding="utf-8")) if args.read else measure(args)
    _report(result, args)


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """The result, as report.py describes it."""
    engines = _engines(args)
    args.output.mkdir(parents=True, exist_ok=True)
    with contextlib.ExitStack() as stack:
        turns = Turns(stack, args.scale, args.output)
        turns.start(engines, args.repeats if "startup" in args.rows else 0)
        shape = ModelShape(**turns.processes["ours"].hello["shape"])
        rows = [row for row in (*WORK_ROWS, *LONG_ROWS) if row in args.rows]
        rates = _rates(shape, rows, args) if rows else None
        for row in rows:
            turns.measure_row(row, args.repeats)
        if "peak_memory" in args.rows:
            turns.add_peak_memory()
        has_pair = {"decode64", "decode64_ids"} <= set(rows)
        pairs = turns.pair("ours", "decode64", "decode64_ids", args.pairs) if has_pair else []
        if rates and args.scale == 1:
            # Measured at both ends of the run; the better rate is one that the machine can reach.
            rates = rates.best_of(_rates(shape, rows, args))
    profile = _profile(args) if args.profile else None
    return {
        "command": args.command,
        "date": utc_now(),
        "machine": describe_machine(),
        "cores": args.cores,
        "model": Path(args.model).stem if args.model else "embedded",
        "shape": vars(shape),
        "dtype": args.dtype,
        "scale": args.scale,
        "engines": turns.engines,
        "rows": turns.rows,
        "bounds": {row: _bounds(row, shape, rates, args) for row in rows} if rates else {},
        "rates": rates_to_json(rates) if rates else None,
        "pairs": pairs,
        "failures": turns.failures,
        "profile": profile,
    }


def _engines(args: argparse.Namespace) -> list[Engine]:
    def engine(name: str, kind: str, python: str, model: str | None, **ours: str) -> Engine:
        return Engine(name, python, EngineOptions(kind, model, args.dtype, args.cores, **ours))

    engines = [engine("ours", "ours", sys.executable, args.model)]
    if args.quantization:
        engines.append(
            engine(f"ours {args.quantization}", "ours", sys.executable, args.model, quantization=args.quantization)
        )
    if args.model_impl:
        engines.append(
            engine(f"ours {args.model_impl}", "ours", sys.executable, args.model, model_impl=args.model_impl)
        )
    if args.against:
        engines.append(engine("before", "ours", sys.executable, args.model, checkout=str(args.against.resolve())))
    if args.upstream:
        engines.append(engine("upstream", "upstream", args.upstream, args.model))
    if args.transformers:
        engines.append(engine("transformers", "transformers", sys.executable, args.model))
    if args.llama_cpp:
        engines.append(engine("llama.cpp", "llama.cpp", args.llama_cpp, args.gguf))
    return engines


def _rates(shape: ModelShape, rows: list[str], args: argparse.Namespace) -> Rates:
    say("rates of the machine")
    works = [count_work(make_workload(row, i, args.scale), shape) for row in rows for i in range(args.repeats)]
    products = sorted({product for work in works for product in work.rows})
    ran = _run_here([str(_HERE / "bounds.py"), json.dumps(vars(shape)), json.dumps(products)], args)
    return rates_from_json(json.loads(ran.splitlines()[-1]))


def _bounds(row: str, shape: ModelShape, rates: Rates, args: argparse.Namespace) -> dict[str, list[float]]:
    works = [count_work(make_workload(row, repeat, args.scale), shape) for repeat in range(args.repeats)]
    bounds = [make_bound(work, shape, rates) for work in works]
    return {part: [getattr(bound, part) for bound in bounds] for part in Bound._fields}


def _profile(args: argparse.Namespace) -> dict[str, Any]:
    """A step of each row of STEPS; of int8, a step of `score`."""
    from profile_step import STEPS

    say("profile")
    common = [str(_HERE / "profile_step.py"), "--dtype", args.dtype, *(["--model", args.model] if args.model else [])]
    ran = _run_here([*common, "--rows", ",".join(row for row in STEPS if row in args.rows)], args)
    profile = json.loads(ran.splitlines()[-1])
    if args.quantization and "score" in args.rows:
        ran = _run_here([*common, "--rows", "score", "--quantization", args.quantization], args)
        profile[f"score, {args.quantization}"] = json.loads(ran.splitlines()[-1])["score"]
    return profile


def _run_here(command: list[str], args: argparse.Namespace) -> str:
    """stdout of a script on the chosen cores."""
    ran = subprocess.run(
        [sys.executable, *command],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": str(len(args.cores))},
        preexec_fn=lambda: os.sched_setaffinity(0, args.cores),
    )
    if ran.returncode:
        raise SystemExit(f"{Path(command[0]).name} ended with {ran.returncode}")
    return ran.stdout


def _report(result: dict[str, Any], args: argparse.Namespace) -> None:
    tables = make_tables(result)
    print(tables)
    for warning in find_warnings(result):
        say(f"warning: {warning}")
    if not args.read:
        (args.output / "compare.json").write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
        (args.output / "compare.md").write_text(tables + "\n", encoding="utf-8")
    chart = (DOCUMENT.parent if args.docs else args.output) / "compare.svg"
    chart.parent.mkdir(parents=True, exist_ok=True)
    if not draw_chart(result, chart):
        say("no chart: it takes matplotlib and a peer to compare with")
    elif args.docs:
        tables += "\n\n![How many times faster, row by row](compare.svg)"
    if args.docs:
        _write_document(result, tables)


def _write_document(result: dict[str, Any], tables: str) -> None:
    """Put the result into docs/performance.md."""
    from profile_step import make_table

    machine = result["machine"]
    facts = f"{machine['cpu']} ({', '.join(machine['isa'])}), cores {result['cores']}; {result['model']}, "
    facts += f"{result['dtype']}; {result['date']}; `{result['command']}`"
    write_section("compare", f"{facts}\n\n{tables}")
    if result["profile"]:
        write_section("profile after", make_table(result["profile"]))


def _command(args: argparse.Namespace) -> str:
    """The command line with paths reduced to names."""
    paths = {args.model, args.gguf, args.upstream, args.llama_cpp, str(args.output)}
    words = [Path(word).name if word in paths else word for word in sys.argv[1:]]
    return shlex.join(["python", "benchmarks/compare.py", *words])


def _cores(text: str) -> list[int]:
    """ "0-2,5" -> [0, 1, 2, 5]."""
    cores: list[int] = []
    for part in text.split(","):
        first, _, last = part.partition("-")
        if not first.isdigit() or not (last or first).isdigit():
            raise argparse.ArgumentTypeError(f"cores look like 0-3 or 0,2, got {text!r}")
        cores += range(int(first), int(last or first) + 1)
    unusable = set(cores) - os.sched_getaffinity(0)
    if unusable:
        raise argparse.ArgumentTypeError(f"core {min(unusable)} is not one that this process may use")
    return sorted(set(cores))


def _parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Engines side by side: the same work, the same cores, in turns.")
    parser.add_argument("--model", help="folder, which the peers load too; default: the embedded model, ours alone")
    parser.add_argument("--upstream", metavar="ENV", help="upstream vLLM's environment: its folder, or its python")
    parser.add_argument("--transformers", action="store_true", help="transformers, in this environment")
    parser.add_argument("--llama-cpp", metavar="ENV", help="the environment of llama_cpp, with --gguf")
    parser.add_argument("--gguf", help="the model's weights for llama.cpp; see llama_cpp_adapter.py for bfloat16 ones")
    parser.add_argument("--quantization", help="ours once more, with quantized weights, such as int8")
    parser.add_argument("--model-impl", help="ours once more, as that implementation of the model: transformers")
    parser.add_argument("--against", type=Path, metavar="CHECKOUT", help="another, built checkout of this package")
    parser.add_argument(
        "--rows",
        type=some_of(ALL_ROWS, "row"),
        default=list(ROWS),
        help=f"some of {','.join(ALL_ROWS)}; default: all but {', '.join(LONG_ROWS)}",
    )
    parser.add_argument("--dtype", default="bfloat16", help="default: %(default)s")
    parser.add_argument("--repeats", type=int, help="measured runs a row (default: 3)")
    parser.add_argument("--pairs", type=int, help="runs of decode64 and decode64_ids side by side (default: 9)")
    parser.add_argument("--cores", type=_cores, default=sorted(os.sched_getaffinity(0)), help="default: all usable")
    parser.add_argument("--scale", type=float, help="factor on the amount of work, for trying out (default: 1)")
    parser.add_argument("--quick", action="store_true", help="one repeat and a tenth of the work: does it run here?")
    parser.add_argument("--profile", action="store_true", help="also where the time of one step of ours goes")
    parser.add_argument("--output", type=Path, default=Path("results"), help="folder (default: %(default)s)")
    parser.add_argument("--docs", action="store_true", help="put tables and chart into docs/performance.md")
    parser.add_argument("--from", dest="read", type=Path, metavar="JSON", help="measure nothing: report that file")
    args = parser.parse_args()
    for name, (usual, quick) in {"repeats": (3, 1), "pairs": (9, 1), "scale": (1.0, 0.1)}.items():
        if getattr(args, name) is None:
            setattr(args, name, quick if args.quick else usual)
    for name in ("repeats", "scale"):
        if getattr(args, name) <= 0:
            parser.error(f"--{name} must be above 0, got {getattr(args, name)}")
    if args.model is None and (args.upstream or args.transformers):
        parser.error("peers need --model")
    if bool(args.llama_cpp) != bool(args.gguf):
        parser.error("--llama-cpp and --gguf go together")
    args.command = _command(args)
    for name in ("model", "gguf"):
        path = getattr(args, name)
        if path and Path(path).exists():
            setattr(args, name, str(Path(path).resolve()))
    try:
        args.upstream = args.upstream and find_python(args.upstream)
        args.llama_cpp = args.llama_cpp and find_python(args.llama_cpp)
    except ValueError as error:
        parser.error(str(error))
    return args


if __name__ == "__main__":
    main()
