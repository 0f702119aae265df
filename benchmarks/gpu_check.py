"""All checks and measurements of the CUDA path, in one command of under eight minutes.

    python benchmarks/gpu_check.py                                  # on a machine with a CUDA device: make gpu-check
    python benchmarks/gpu_check.py --device cpu --scale tiny        # the same code on any machine
    python benchmarks/gpu_check.py --from results/gpu_check.json --docs

Runs the tests marked `gpu`; holds every Triton kernel to float64 on fresh random inputs; measures what the card copies
and multiplies a second; and fills the table of docs/performance.md, ratios of measurements of this very run. Needs
torch, triton, transformers and pytest, and no installation: it runs from a checkout.

Each part runs in its own process (benchmarks/gpu/), with its share of the time; a case that fails, hangs or makes the
device unusable leaves its traceback, and the rest continues. --output has every figure after each case. The last line
of stdout is the result as JSON; the exit status is 1 after a failure or if something was not run, with --strict also if
a row misses its target.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import shlex
import signal
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from common import some_of, utc_now
from gpu import arithmetic
from gpu.sizes import FULL
from gpu.suite import Suite
from gpu.supervise import ROOT, START, run_part
from gpu.tables import failures, make_section, make_table, missed
from report import write_section

# Parts in their order, each with its share of the budget; unused time is left to the next ones.
_SHARES = {"card": 0.1, "kernels": 0.35, "readings": 0.1, "attention": 0.1, "engine": 0.35}
PARTS = ("tests", *_SHARES)
# Whose rows are shares of what the card measures.
_NEED_RATES = {"readings", "attention"}


def main() -> int:
    """Measure, or read a result, and report."""
    args = _parse_args()
    # An exception, so that the processes that it started are ended, too.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("terminated"))
    result = json.loads(args.read.read_text(encoding="utf-8")) if args.read else _run(args)
    print(make_table(result))
    if args.docs:
        if (result["device"], result["scale"]) != ("cuda", "full"):
            raise SystemExit("--docs is for a run on a GPU at full scale")
        write_section("gpu", make_section(result))
        write_section("gpu bounds", arithmetic.make_table(FULL, arithmetic.H200))
    print(json.dumps(result))
    return int(bool(failures(result) or (args.strict and missed(result))))


def _run(args: argparse.Namespace) -> dict[str, Any]:
    began = time.monotonic()
    result: dict[str, Any] = {
        "command": _command(args),
        "date": utc_now(),
        "scale": args.scale,
        "device": args.device,
        "seed": args.seed,
        "parts": {part: {} for part in args.parts},
    }
    _say(f"seed {args.seed}")
    args.output.parent.mkdir(parents=True, exist_ok=True)

    def save() -> None:
        result["seconds"] = time.monotonic() - began
        args.output.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")

    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        # Only untimed cases run beside the tests.
        order = sorted(args.parts, key=("card", "tests", *_SHARES).index)
        tests: Suite | None = None
        for index, part in enumerate(order):
            deadline = began + args.budget_seconds * (1 - sum(_SHARES.get(later, 0) for later in order[index + 1 :]))
            if part == "tests":
                tests = Suite(Path(folder), args.device == "cuda")
                stack.callback(tests.kill)
                continue
            _say(f"{part}, at most {deadline - time.monotonic():.0f} s")
            run_part(part, _options(args, folder, result), _environment(args), deadline, result["parts"][part], save)
            if tests is not None:
                result["parts"]["tests"] = tests.finish(deadline)
                tests = None
            if part == "card" and START in result["parts"][part]:
                break
        if tests is not None:
            result["parts"]["tests"] = tests.finish(began + args.budget_seconds)
        save()
    return result


def _options(args: argparse.Namespace, folder: str, result: dict[str, Any]) -> dict[str, Any]:
    rates: dict[str, float] = {}
    for case in result["parts"].get("card", {}).values():
        rates.update({name: value for name, value in case.get("result", {}).items() if name.endswith("_per_second")})
    return {"device": args.device, "scale": args.scale, "seed": args.seed, "folder": folder, "rates": rates}


def _environment(args: argparse.Namespace) -> dict[str, str]:
    interpreted = {"TRITON_INTERPRET": "1"} if args.device == "cpu" else {}
    return {"HF_HUB_OFFLINE": "1", **interpreted}


def _command(args: argparse.Namespace) -> str:
    """The command line with the output's path reduced to its name."""
    words = [args.output.name if word == str(args.output) else word for word in sys.argv[1:]]
    return shlex.join(["python", "benchmarks/gpu_check.py", *words])


def _say(text: str) -> None:
    print(f"gpu_check: {text}", file=sys.stderr, flush=True)


def _parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Tests, kernels and figures of the CUDA path in one command.")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="default: %(default)s")
    parser.add_argument("--scale", choices=("full", "tiny"), default="full", help="sizes (default: %(default)s)")
    parser.add_argument(
        "--parts", type=some_of(PARTS, "part"), default=list(PARTS), help=f"some of {','.join(PARTS)}; default: all"
    )
    parser.add_argument("--budget-seconds", type=float, default=440.0, help="for everything (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=None, help="of inputs and weights; default: a fresh one")
    parser.add_argument("--strict", action="store_true", help="a row that misses its target is a failure")
    parser.add_argument(
        "--output", type=Path, default=ROOT / "results" / "gpu_check.json", help="JSON file (default: %(default)s)"
    )
    parser.add_argument("--docs", action="store_true", help="put the table into docs/performance.md")
    parser.add_argument("--from", dest="read", type=Path, metavar="JSON", help="measure nothing: report that file")
    args = parser.parse_args()
    if args.budget_seconds <= 0:
        parser.error(f"--budget-seconds must be above 0, got {args.budget_seconds}")
    if "card" not in args.parts and _NEED_RATES.intersection(args.parts):
        args.parts = ["card", *args.parts]
    if args.seed is None:
        args.seed = random.SystemRandom().randrange(2**31)
    return args


if __name__ == "__main__":
    os.chdir(ROOT)
    sys.exit(main())
