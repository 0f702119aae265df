"""The time of one step by operation.

    python benchmarks/profile_step.py                      # the embedded model
    python benchmarks/profile_step.py --model FOLDER --rows decode64
    python benchmarks/profile_step.py --checkout OLDER --docs before      # another revision, built in its folder

Steps are timed without the profiler, and under torch's profiler by a second engine with `enforce_eager`, as a replayed
step is one operation. Shares are of the profiled step; the rest is Python and about a microsecond an operation for the
profiler. Prints markdown tables and JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from collections import defaultdict
from dataclasses import replace
from pathlib import Path
from typing import Any

from adapters import VllmAdapter, make_adapter, prepare_process
from common import make_parser, some_of
from report import markdown_table, write_section
from workloads import EngineOptions, make_workload

# Each row has steps to skip and steps to measure. Scoring takes about five steps, a shared prefix three, the first of
# which computes it; decoding begins with the prompts.
STEPS = {
    "score": (1, 3),
    "score_prefix": (1, 1),
    "decode64": (4, 24),
    "decode64_ids": (4, 24),
    "decode1": (4, 40),
    "prompt_logprobs": (1, 2),
}

_SHOWN = 12
_REST = "between the operations"


def main() -> None:
    """Load, profile, print."""
    args = _parse_args()
    options = EngineOptions("ours", args.model, args.dtype, sorted(os.sched_getaffinity(0)), args.quantization)
    prepare_process(options)
    if args.checkout:
        sys.path.insert(0, str(args.checkout.resolve()))
    adapters = [make_adapter(options), make_adapter(replace(options, enforce_eager=True))]
    plain, eager = (adapter for adapter in adapters if isinstance(adapter, VllmAdapter))
    profile = {row: profile_row(plain, eager, row, args.scale) for row in args.rows}
    table = make_table(profile)
    print(table)
    if args.docs:
        write_section(f"profile {args.docs}", table)
    print(json.dumps(profile))


def profile_row(adapter: VllmAdapter, eager: VllmAdapter, row: str, scale: float) -> dict[str, Any]:
    """Profile a row of STEPS on `eager`: {"steps": number, "milliseconds" and "profiled_milliseconds" of one,
    "operations": [{"name", "calls", "microseconds"}] of one, the most expensive first, the rest last}."""
    from torch.profiler import ProfilerActivity, profile

    skipped, count = STEPS[row]
    for each in (eager, adapter):
        _run_steps(each, row, -1, scale, skipped, count)
    plain = _run_steps(adapter, row, 0, scale, skipped, count)
    profiler = profile(activities=[ProfilerActivity.CPU], record_shapes=True)
    seconds = _run_steps(eager, row, 1, scale, skipped, count, profiler)
    spent: dict[str, list[float]] = defaultdict(lambda: [0, 0.0])
    for event in profiler.key_averages(group_by_input_shape=True):
        total = spent[_label(event.key, event.input_shapes)]
        total[0] += event.count
        total[1] += event.self_cpu_time_total
    operations = [
        {"name": name, "calls": calls / len(seconds), "microseconds": total / len(seconds)}
        for name, (calls, total) in sorted(spent.items(), key=lambda item: -item[1][1])
    ]
    rest = 1e6 * statistics.mean(seconds) - sum(operation["microseconds"] for operation in operations)
    operations.append({"name": _REST, "calls": 1, "microseconds": rest})
    return {
        "steps": len(seconds),
        "milliseconds": 1e3 * statistics.median(plain),
        "profiled_milliseconds": 1e3 * statistics.mean(seconds),
        "operations": operations,
    }


def make_table(profile: dict[str, Any]) -> str:
    """A table for each row: calls, microseconds and share of each operation in one step."""
    parts = []
    for row, step in profile.items():
        *operations, rest = step["operations"]
        shown, others = operations[:_SHOWN], operations[_SHOWN:]
        if others:
            sums = {key: sum(operation[key] for operation in others) for key in ("calls", "microseconds")}
            shown = [*shown, {"name": f"{len(others)} other operations", **sums}]
        lines = [
            [
                operation["name"],
                f"{operation['calls']:g}",
                f"{operation['microseconds']:,.0f}",
                f"{operation['microseconds'] / step['profiled_milliseconds'] / 1e3:.1%}",
            ]
            for operation in (*shown, rest)
        ]
        head = ["operation", "calls", "µs", "share"]
        times = f"{step['milliseconds']:.2f} ms, {step['profiled_milliseconds']:.2f} ms under the profiler"
        parts.append(f"One step of `{row}`: {times}.\n\n" + markdown_table(head, lines, num_text=1))
    return "\n\n".join(parts)


def _run_steps(
    adapter: VllmAdapter, row: str, repeat: int, scale: float, skipped: int, count: int, profiler: Any = None
) -> list[float]:
    """Seconds of each measured step; the work is done to its end."""
    work = make_workload(row, repeat, scale)
    engine, params = adapter.llm.llm_engine, adapter.sampling_params(work)
    for number, prompt in enumerate(work.prompts):
        engine.add_request(f"{row}/{repeat}/{number}", {"prompt_token_ids": prompt}, params)
    for _ in range(skipped):
        engine.step()
    seconds = []
    if profiler is not None:
        profiler.start()
    for _ in range(count):
        if not engine.has_unfinished_requests():
            break
        began = time.perf_counter()
        engine.step()
        seconds.append(time.perf_counter() - began)
    if profiler is not None:
        profiler.stop()
    if not seconds:
        raise SystemExit(f"{row}: all work was done in the {skipped} skipped steps; use a larger --scale")
    while engine.has_unfinished_requests():
        engine.step()
    return seconds


def _label(name: str, shapes: list[Any]) -> str:
    """The operation's name, with the factors' shapes for products."""
    if "linear" not in name and not name.endswith("mm"):
        return name
    return " ".join([name, *(str(shape) for shape in shapes[:2] if shape)])


def _parse_args() -> argparse.Namespace:
    parser = make_parser("The time of one step by operation.", dtype=True)
    rows = f"some of {','.join(STEPS)}"
    parser.add_argument("--rows", type=some_of(STEPS, "row"), default=["decode64", "score"], help=rows)
    parser.add_argument("--quantization", help="quantized weights, such as int8")
    parser.add_argument("--scale", type=float, default=1.0, help="factor on the amount of work, for trying out")
    parser.add_argument("--checkout", type=Path, help="folder whose vllm is profiled; default: this one")
    parser.add_argument("--docs", choices=("before", "after"), help="put the tables into docs/performance.md")
    return parser.parse_args()


if __name__ == "__main__":
    main()
