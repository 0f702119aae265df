"""Quantised weights: ours as the file has them, with and without 8-bit activations, against llama.cpp on the same GGUF
file and against our own bfloat16, in turns.

    python benchmarks/quantized.py --gguf FILE.gguf --llama-cpp ENVIRONMENT
    python benchmarks/quantized.py --quick          # the embedded model, without llama.cpp
    python benchmarks/quantized.py --processor-time # for a busy machine: one thread, and its processor time

A round does each row with each engine once. The table has each engine's best round, and the medians of the rounds'
ratios. The last line is all of it as JSON.
"""

from __future__ import annotations

import argparse
import contextlib
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

from common import make_parser, print_result, say, usable_cores, utc_now
from engines import Engine, EngineError, EngineProcess, find_python
from workloads import EngineOptions

ROWS = ("decode1", "decode16", "decode64", "score")
OURS, INT8, PLAIN, LLAMA = "ours", "ours, int8 activations", "ours, bfloat16", "llama.cpp"
PAIRS = ((OURS, LLAMA), (INT8, LLAMA), (OURS, PLAIN), (INT8, PLAIN))


def main() -> None:
    """Start the engines, measure in turns, report."""
    args = _parse_args()
    found: dict[str, dict[str, list[float]]] = {row: {} for row in args.rows}
    with tempfile.TemporaryDirectory() as logs, contextlib.ExitStack() as stack:
        processes: dict[str, EngineProcess] = {}
        for engine in _engines(args):
            say(f"starting {engine.name}")
            # The first start converts the file.
            EngineProcess(engine, Path(logs)).close()
            processes[engine.name] = stack.enter_context(EngineProcess(engine, Path(logs)))
        for row in args.rows:
            for repeat in range(-1, args.rounds):
                for name, process in processes.items():
                    rate = _rate(process, row, repeat, args)
                    if repeat >= 0 and rate is not None:
                        found[row].setdefault(name, []).append(rate)
            say(f"{row}: " + ", ".join(f"{name} {max(rates):.4g}" for name, rates in found[row].items()))
        starts = {name: process.startup_seconds for name, process in processes.items()}
        weights = {name: process.hello.get("weight_mib") for name, process in processes.items()}
    _print_table(found, starts, weights)
    print_result(
        date=utc_now(),
        gguf=Path(args.gguf).name if args.gguf else "embedded",
        rates=found,
        ratios={row: _ratios(found[row]) for row in args.rows},
        startup_seconds=starts,
        weight_mib=weights,
    )


def _parse_args() -> argparse.Namespace:
    parser = make_parser(
        "Quantised weights of a GGUF file, against llama.cpp and against our own bfloat16.", model=False
    )
    parser.add_argument("--gguf", help="the file; default: the embedded model's")
    parser.add_argument("--llama-cpp", help="the environment with llama_cpp")
    parser.add_argument("--rows", type=lambda text: text.split(","), default=list(ROWS), help=",".join(ROWS))
    parser.add_argument("--rounds", type=int, default=5, help="default: %(default)s")
    parser.add_argument("--scale", type=float, default=1.0, help="of the work; default: %(default)s")
    parser.add_argument("--processor-time", action="store_true", help="one thread each, measured by processor time")
    parser.add_argument("--quick", action="store_true", help="one small round")
    args = parser.parse_args()
    if unknown := [row for row in args.rows if row not in ROWS]:
        parser.error(f"--rows must be of {', '.join(ROWS)}, got {unknown[0]!r}")
    if args.quick:
        args.rounds, args.scale = 1, 0.1
    return args


def _engines(args: argparse.Namespace) -> list[Engine]:
    cores = list(range(usable_cores()))[: 1 if args.processor_time else 2]
    file = args.gguf or _embedded()

    def ours(name: str, **environment: str) -> Engine:
        return Engine(name, sys.executable, EngineOptions("ours", file, "bfloat16", cores, environment=environment))

    engines = [ours(OURS), ours(INT8, VLLM_CPU_INT8_ACTIVATIONS="1"), ours(PLAIN, VLLM_GGUF_DEQUANTIZE="1")]
    if args.llama_cpp:
        engines.append(Engine(LLAMA, find_python(args.llama_cpp), EngineOptions("llama.cpp", file, "bfloat16", cores)))
    return engines


def _embedded() -> str:
    from vllm.model_executor.model_loader import embedded_model_path

    return str(embedded_model_path())


def _rate(process: EngineProcess, row: str, repeat: int, args: argparse.Namespace) -> float | None:
    try:
        answer = process.measure(row, repeat, args.scale)
    except EngineError as error:
        say(str(error))
        return None
    return answer["amount"] / answer["cpu_seconds" if args.processor_time else "seconds"]


def _ratios(rates: dict[str, list[float]]) -> dict[str, float]:
    """Medians over the rounds, by "one / other"."""
    return {
        f"{one} / {other}": round(statistics.median(a / b for a, b in zip(rates[one], rates[other], strict=True)), 3)
        for one, other in PAIRS
        if one in rates and other in rates
    }


def _print_table(found: dict[str, dict[str, list[float]]], starts: dict[str, float], weights: dict[str, Any]) -> None:
    print(f"| | {' | '.join(starts)} | ratios |\n|---|{'---|' * (len(starts) + 1)}")
    for row, rates in found.items():
        cells = [f"{max(rates[name]):.4g}" if name in rates else "" for name in starts]
        ratios = ", ".join(f"{pair} {ratio:.2f}" for pair, ratio in _ratios(rates).items())
        print(f"| {row} | {' | '.join(cells)} | {ratios} |")
    print(f"| start, s | {' | '.join(f'{starts[name]:.2f}' for name in starts)} | |")
    print(f"| weights, MiB | {' | '.join(str(weights[name]) for name in starts)} | |")


if __name__ == "__main__":
    main()
