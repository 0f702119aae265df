"""Every C++ kernel against its PyTorch reference and against the machine's limits; `linear_quantized` against bfloat16.

    python benchmarks/kernels.py                                # all kernels, both models' shapes
    python benchmarks/kernels.py --kernels linear,topk --models SmolLM2-135M

The limit of a kernel is the measured bandwidth of reading as many bytes as it moves, or the rate of the fastest large
product with the same threads and type of weights. Weights and caches come from memory, as in a model. Prints a markdown
table and JSON.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from common import add_counts, describe_machine, say, seconds_of, some_of, usable_cores
from kernel_cases import KERNELS, MODELS, Case, make_cases
from report import markdown_table, number, write_section

from vllm.ops._dispatch import cpu_ops, force

_BATCH_SECONDS = 0.03


def main() -> None:
    """Measure and report."""
    args = _parse_args()
    if cpu_ops() is None:
        raise SystemExit("the CPU kernels are not built: python setup.py build_ext --inplace")
    records = []
    with torch.inference_mode():
        for model in args.models:
            for case in make_cases(MODELS[model], args.kernels):
                records.append({"model": model, **measure(case, args.threads, args.batches)})
                say(f"{model} {case.kernel} {case.label}")
    result = {"machine": describe_machine(), "threads": args.threads, "kernels": records}
    table = make_table(records, args.threads)
    print(table)
    if args.docs:
        section = f"{result['machine']['cpu']} ({', '.join(result['machine']['isa'])}).\n\n{table}"
        write_section("kernels", section)
    print(json.dumps(result))


def measure(case: Case, threads: int, batches: int) -> dict[str, Any]:
    """Seconds of one call of the kernel with one thread and with all, of the reference with all; the kernel's share
    of the machine's limit."""
    fields: dict[str, Any] = {"kernel": case.kernel, "case": case.label, "flops": case.flops, "bytes": case.num_bytes}
    for name, count in (("one_thread", 1), ("all_threads", threads)):
        torch.set_num_threads(count)
        with force("cpp"):
            seconds = time_call(case.call, case.reset, batches)
        fields[name] = seconds
        fields[f"{name}_of_machine"] = _machine_seconds(case, count) / seconds
    with force("reference"):
        fields["reference"] = time_call(case.reference or case.call, case.reset, batches)
    return fields


def time_call(call: Callable[[], object], reset: Callable[[], object] | None, batches: int) -> float:
    """Seconds of one call: the mean of the best of several batches. `reset` is called before each call, untimed."""

    def once() -> float:
        if reset is not None:
            reset()
        return seconds_of(call)

    count = max(1, round(_BATCH_SECONDS / max(1e-6, min(once() for _ in range(3)))))
    if reset is not None:
        return min(sum(once() for _ in range(count)) for _ in range(batches)) / count

    def batch() -> None:
        for _ in range(count):
            call()

    return min(seconds_of(batch) for _ in range(batches)) / count


def make_table(records: list[dict[str, Any]], threads: int) -> str:
    """One line a case."""
    head = ["model", "kernel", "case", "rate", "µs, 1 thread", "of machine", f"µs, {threads} threads", "of machine"]
    lines = [
        [
            record["model"],
            record["kernel"],
            record["case"],
            _rate(record),
            number(1e6 * record["one_thread"]),
            f"{record['one_thread_of_machine']:.0%}",
            number(1e6 * record["all_threads"]),
            f"{record['all_threads_of_machine']:.0%}",
            f"{record['reference'] / record['all_threads']:.2f}x",
        ]
        for record in records
    ]
    return markdown_table([*head, "reference / kernel"], lines, num_text=3)


def _rate(record: dict[str, Any]) -> str:
    if record["flops"]:
        return f"{number(record['flops'] / record['all_threads'] / 1e9)} GFLOP/s"
    return f"{number(record['bytes'] / record['all_threads'] / 1e9)} GB/s"


def _machine_seconds(case: Case, threads: int) -> float:
    """The longer of the times of the case's multiplications alone and of its memory traffic alone."""
    moving = case.num_bytes / _read_rate(_power_of_two(case.working_set), threads)
    return max(moving, case.flops / _gemm_rate(threads, case.integers))


@cache
def _read_rate(num_bytes: int, threads: int) -> float:
    from bounds import measure_read_rate

    torch.set_num_threads(threads)
    return measure_read_rate(num_bytes)


@cache
def _gemm_rate(threads: int, integers: bool) -> float:
    """Operations a second of a large product by the fastest kernel, of bfloat16 or with 8-bit weights."""
    from bounds import available_kernels, pack_as

    from vllm.ops.int8_linear import int8_linear, pack_int8_linear
    from vllm.ops.packed_linear import packed_linear

    torch.set_num_threads(threads)
    rows, columns, inner = 1024, 2048, 1024
    x, weight = torch.randn(rows, inner).bfloat16(), torch.randn(columns, inner).bfloat16()
    if integers:
        quantised = pack_int8_linear(weight, None)
        return 2 * rows * columns * inner / time_call(lambda: int8_linear(x, quantised), None, 5)
    best = float("inf")
    for kernel in (*available_kernels(), "plain"):
        packed = pack_as(weight, kernel)
        best = min(best, time_call(lambda packed=packed: packed_linear(x, packed), None, 5))
    return 2 * rows * columns * inner / best


def _power_of_two(size: int) -> int:
    """Between a page and more than any cache."""
    return 2 ** min(29, max(12, (size - 1).bit_length()))


def _parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="C++ kernels against their references and the machine.")
    for what, known in {"kernel": KERNELS, "model": MODELS}.items():
        names = f"some of {','.join(known)}"
        parser.add_argument(f"--{what}s", type=some_of(known, what), default=list(known), help=names)
    add_counts(parser, threads=(usable_cores(), ""), batches=(5, "batches of calls, the best counts"))
    parser.add_argument("--docs", action="store_true", help="put the table into docs/performance.md")
    args = parser.parse_args()
    for name in ("threads", "batches"):
        if getattr(args, name) <= 0:
            parser.error(f"--{name} must be above 0, got {getattr(args, name)}")
    return args


if __name__ == "__main__":
    main()
