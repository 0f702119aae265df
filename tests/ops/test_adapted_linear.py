"""Products to which adapters add theirs in the same operation: every layout, rows of different adapters and of none."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from backends import DTYPES, assert_accurate, chosen, strided
from layouts import BFLOAT16_LAYOUTS, CPP_LEVELS
from torch import Tensor

from vllm.layers.linear_method import INT8, UNQUANTIZED, LinearMethod, before_gate, linear_method, takes_adapters
from vllm.ops.adapted_linear import AdaptedWeights
from vllm.ops.add_lora import AddedAdapters
from vllm.ops.rms_norm import AddedNorm

MAX_RANK = 20
# The parts' outputs, whether they are a gate and what is multiplied with it; the ranks of three adapters.
CASES: dict[str, tuple[list[int], bool, list[list[int]]]] = {
    "one part": ([70], False, [[16], [3], [20]]),
    "parts that share panels": ([33, 1, 70], False, [[16, 0, 2], [1, 1, 1], [0, 7, 20]]),
    "gate": ([40, 40], True, [[16, 5], [8, 8], [0, 17]]),
}
INNER = 74
# The values between an adapter's products may be rounded to bfloat16, by 2^-9; the products are added up, and may be
# several times their sum.
SLACK = {torch.float32: 1e-5, torch.float16: 1e-5, torch.bfloat16: 2**-7}


class Case:
    """A weight with three adapters, the last with a gain and a shift."""

    def __init__(self, name: str, dtype: torch.dtype, method: LinearMethod, has_bias: bool, inner: int = INNER) -> None:
        torch.manual_seed(5)
        sizes, self.gated, ranks = CASES[name]
        self.borders = [sum(sizes[:index]) for index in range(len(sizes) + 1)]
        columns = self.borders[-1]
        self.weight, self.bias = torch.randn(columns, inner).to(dtype) / 8, torch.randn(columns).to(dtype)
        self.bias = self.bias if has_bias else torch.zeros(columns)
        self.method = method
        self.packed = method.pack(self.weight, self.bias.to(dtype) if has_bias else None, gated=self.gated)
        assert takes_adapters(self.packed) and self.packed.gated == self.gated
        # The weight may have been rounded.
        wide = {"float_out": True} if method is not UNQUANTIZED else {}
        units = before_gate(method.apply, torch.eye(inner).to(dtype), self.packed, **wide).double()
        self.exact = self.weight.double() if method is UNQUANTIZED else (units - self.bias.double()).T
        self.adapters = AdaptedWeights(sizes, inner, self.gated, self.weight, 3, MAX_RANK)
        self.deltas = torch.zeros(3, columns, inner, dtype=torch.float64)
        self.gain, self.shift = torch.zeros(2, 3, columns)
        for adapter in range(3):
            # The slot still has values of an adapter that was there before.
            self.adapters.put(adapter, 0, torch.ones(MAX_RANK, inner), torch.full((sizes[0], MAX_RANK), 9.0), 9.0)
            self.adapters.clear(adapter)
            for part, (first, end) in enumerate(pairwise(self.borders)):
                rank = ranks[adapter][part]
                a, b = torch.randn(rank, inner).to(dtype) / 8, torch.randn(end - first, rank).to(dtype) / 2
                self.adapters.put(adapter, part, a, b, 0.5 + part)
                self.deltas[adapter, first:end] = (0.5 + part) * (b.double() @ a.double())
        self.gain[2], self.shift[2] = torch.randn(columns) / 4, torch.randn(columns)
        self.adapters.put_vectors(2, self.gain[2], self.shift[2])

    def of(self, adapters: Tensor) -> AddedAdapters:
        """Products of rows with these adapters, -1 = none."""
        order = torch.where(adapters < 0, 3, adapters).argsort(stable=True).int()
        counts = torch.tensor([int((adapters == number).sum()) for number in range(3)])
        return self.adapters.of(order, F.pad(counts.cumsum(0), (1, 0)).int())

    def product(self, x: Tensor, adapters: Tensor | None, **options: Any) -> Tensor:
        own = {} if adapters is None else {"adapters": self.of(adapters)}
        return self.method.apply(x, self.packed, **own, **options)

    def truth(self, x: Tensor, adapters: Tensor) -> Tensor:
        """In float64."""
        rows = []
        for row, adapter in zip(x.double(), adapters.tolist(), strict=True):
            own = self.exact @ row + self.bias.double()
            if adapter >= 0:
                own = own * (1 + self.gain[adapter].double()) + self.shift[adapter].double()
                own = own + self.deltas[adapter] @ row
            rows.append(own)
        whole = torch.stack(rows)
        if not self.gated:
            return whole
        gate, up = whole.chunk(2, dim=1)
        return F.silu(gate) * up


def rows_of(count: int) -> Tensor:
    """Adapters of so many rows, in any order and, behind them, in runs."""
    generator = torch.Generator().manual_seed(count)
    mixed = torch.randint(-1, 3, (count,), generator=generator)
    return torch.cat([mixed[: count // 2], mixed[count // 2 :].sort().values])


@pytest.mark.parametrize("backend", CPP_LEVELS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", CASES)
def test_equals_float64(backend: str, name: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    for layout in BFLOAT16_LAYOUTS if dtype == torch.bfloat16 else BFLOAT16_LAYOUTS[:1]:
        monkeypatch.setenv("VLLM_CPU_GEMM", layout)
        for has_bias in (False, True):
            with chosen(backend):
                case = Case(name, dtype, UNQUANTIZED, has_bias)
                for count in (1, 7, 40):
                    x, adapters = strided(torch.randn(count, INNER).to(dtype)), rows_of(count)
                    got = case.product(x, adapters)
                    slack = max(SLACK[dtype], 2e-3 if layout == "packed_fp16" else 0)
                    assert_accurate(backend, got, case.truth(x, adapters), slack=slack)


@pytest.mark.parametrize("backend", CPP_LEVELS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_an_odd_number_of_values(backend: str, dtype: torch.dtype) -> None:
    with chosen(backend):
        case = Case("parts that share panels", dtype, UNQUANTIZED, True, inner=33)
        # Behind each row there is NaN.
        x, adapters = strided(torch.randn(9, 33).to(dtype)), rows_of(9)
        assert_accurate(backend, case.product(x, adapters), case.truth(x, adapters), slack=SLACK[dtype])


@pytest.mark.parametrize("backend", CPP_LEVELS)
@pytest.mark.parametrize("quantization", ["int8", "int4", "fp8"])
@pytest.mark.parametrize("name", ["parts that share panels", "gate"])
def test_of_quantised_weights(backend: str, name: str, quantization: str) -> None:
    """Whose inputs may be rounded, before a product that adapters have no part in."""
    with chosen(backend):
        case = Case(name, torch.bfloat16, linear_method(quantization), True)
        x, adapters = torch.randn(40, INNER).bfloat16(), rows_of(40)
        slack = 2**-5 if case.method is INT8 else SLACK[torch.bfloat16]
        assert_accurate(backend, case.product(x, adapters), case.truth(x, adapters), slack=slack)


@pytest.mark.parametrize("backend", CPP_LEVELS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("quantization", [None, "int8", "int4"])
def test_a_row_does_not_depend_on_the_others(
    backend: str, quantization: str | None, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor, without an adapter, on whether others have one; whatever the number of rows is, and so who multiplies."""
    for layout in BFLOAT16_LAYOUTS if dtype == torch.bfloat16 and quantization is None else BFLOAT16_LAYOUTS[:1]:
        monkeypatch.setenv("VLLM_CPU_GEMM", layout)
        with chosen(backend):
            case = Case("gate", dtype, linear_method(quantization), True)
            x, adapters = torch.randn(300, INNER).to(dtype), rows_of(300)
            # Values of such different sizes that float16 sums leave the row to others.
            x[::7] *= torch.logspace(-8, 4, INNER).to(dtype)
            together = case.product(x, adapters)
            assert torch.equal(together[adapters < 0], case.product(x, None)[adapters < 0])
            for first, count in ((0, 1), (7, 1), (140, 6), (3, 64), (290, 10)):
                own = slice(first, first + count)
                assert torch.equal(case.product(x[own], adapters[own]), together[own])


@pytest.mark.parametrize("backend", CPP_LEVELS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_of_normed_rows(backend: str, dtype: torch.dtype) -> None:
    """The bits are those of a separate norm."""
    with chosen(backend):
        case = Case("gate", dtype, UNQUANTIZED, False)
        for count in (5, 200):
            x, stream, adapters = (
                torch.randn(count, INNER).to(dtype),
                torch.randn(count, INNER).to(dtype),
                rows_of(count),
            )
            norms = [AddedNorm(stream.clone(), torch.rand(INNER).to(dtype) + 0.5, 1e-5)] * 2
            norms[1] = norms[0]._replace(residual=stream.clone())
            together = case.product(x, adapters, norm=norms[0])
            assert torch.equal(together, case.product(norms[1](x), adapters))
            assert torch.equal(norms[0].residual, norms[1].residual)


@pytest.mark.parametrize("backend", CPP_LEVELS)
def test_float32_results(backend: str) -> None:
    with chosen(backend):
        case = Case("one part", torch.bfloat16, UNQUANTIZED, True)
        x, adapters = torch.randn(20, INNER).bfloat16(), rows_of(20)
        if case.packed.scales is not None:
            pytest.skip("the head has another layout")
        got = case.product(x, adapters, float_out=True)
        assert got.dtype == torch.float32
        assert_accurate(backend, got, case.truth(x, adapters), slack=SLACK[torch.bfloat16])


@pytest.mark.parametrize("backend", CPP_LEVELS[:1])
def test_what_does_not_belong_together_is_refused(backend: str) -> None:
    with chosen(backend):
        case = Case("one part", torch.float32, UNQUANTIZED, False)
        other = UNQUANTIZED.pack(torch.randn(130, INNER), None)
        x, rows = torch.randn(4, INNER), torch.zeros(4, dtype=torch.int64)
        for complaint, packed, inputs, own in (
            ("adapters are of a weight with 96 columns in its panels, got 130", other, x, case.of(rows)),
            ("order must have size 4", case.packed, x, case.of(rows[:3])),
        ):
            with pytest.raises(RuntimeError, match=complaint):
                UNQUANTIZED.apply(inputs, packed, adapters=own)
        narrow = UNQUANTIZED.pack(torch.randn(70, 5), None)
        with pytest.raises(RuntimeError, match="x must have 74 columns for its adapters, got 5"):
            UNQUANTIZED.apply(torch.randn(4, 5), narrow, adapters=case.of(rows))
