"""kernels.py: every kernel has cases that run, in every backend, and lines in the table."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType

import pytest
import torch

from vllm.ops._dispatch import cpu_ops, force

Import = Callable[[str], ModuleType]


@pytest.mark.skipif(cpu_ops() is None, reason="the CPU kernels are not built")
def test_every_case_runs_in_both_implementations(benchmark_module: Import, monkeypatch: pytest.MonkeyPatch) -> None:
    cases = benchmark_module("kernel_cases")
    monkeypatch.setattr(cases, "ROWS", (1, 3))
    monkeypatch.setattr(cases, "LOGITS_ROWS", (2,))
    monkeypatch.setattr(cases, "QUANTIZED_ROWS", (1, 3))
    monkeypatch.setattr(cases, "_COLD_BYTES", 1)
    monkeypatch.setattr(cases, "_DECODES", ((2, 20),))
    monkeypatch.setattr(cases, "_PREFILLS", ((2, 20),))
    monkeypatch.setattr(cases, "_SHARED", ((2, 3, 16),))
    shape = benchmark_module("bounds").ModelShape(2, 32, 64, 4, 2, 16, 2000)
    seen = set()
    with torch.inference_mode():
        for case in cases.make_cases(shape, list(cases.KERNELS)):
            seen.add(case.kernel)
            assert case.num_bytes > 0 and case.working_set >= case.num_bytes // 2
            for backend, call in (("cpp", case.call), ("reference", case.reference or case.call)):
                if case.reset is not None:
                    case.reset()
                with force(backend):  # type: ignore[arg-type]
                    call()
    assert seen == set(cases.KERNELS)


def test_a_call_is_timed_without_its_reset(benchmark_module: Import, monkeypatch: pytest.MonkeyPatch) -> None:
    kernels = benchmark_module("kernels")
    now = [0.0]

    def advance(seconds: float) -> Callable[[], None]:
        def call() -> None:
            now[0] += seconds

        return call

    monkeypatch.setattr(benchmark_module("common").time, "perf_counter", lambda: now[0])
    assert kernels.time_call(advance(0.01), advance(5.0), 3) == pytest.approx(0.01)
    assert kernels.time_call(advance(0.01), None, 3) == pytest.approx(0.01)


def test_table(benchmark_module: Import) -> None:
    times = {"one_thread": 4e-6, "all_threads": 2e-6, "reference": 8e-6}
    shares = {"one_thread_of_machine": 0.5, "all_threads_of_machine": 0.25}
    common = {"model": "m", "case": "c", **times, **shares}
    moved, multiplied = {"flops": 0, "bytes": 4000}, {"flops": 6000, "bytes": 4000}
    records = [{**common, "kernel": "topk", **moved}, {**common, "kernel": "linear", **multiplied}]
    assert benchmark_module("kernels").make_table(records, 2).splitlines()[2:] == [
        "| m | topk | c | 2.00 GB/s | 4.00 | 50% | 2.00 | 25% | 4.00x |",
        "| m | linear | c | 3.00 GFLOP/s | 4.00 | 50% | 2.00 | 25% | 4.00x |",
    ]
