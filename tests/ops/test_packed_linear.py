"""packed_linear: our layouts and the plain product, against float64."""

from __future__ import annotations

import itertools

import pytest
import torch
import torch.nn.functional as F
from backends import DTYPES, assert_accurate, chosen, strided
from layouts import BFLOAT16_LAYOUTS, CPP_LEVELS, LEVELS, needs_float16, needs_kernels
from torch import Tensor

from vllm.ops.gate_and_mul import gate_and_mul
from vllm.ops.packed_linear import Layout, PackedLinear, pack_as, pack_linear, packed_linear, unpack_linear

# Below, at and above the panel's 32 columns, a chain's 256 products and every tile height.
SHAPES = [(1, 1), (31, 7), (32, 16), (33, 256), (70, 257), (130, 600), (3, 1500)]
ROWS = [0, 1, 2, 4, 7, 14, 15, 130]


# Layouts that hold any float, and bfloat16 alone.
EXACT: tuple[tuple[Layout, torch.dtype], ...] = (
    *(("packed_f32", dtype) for dtype in DTYPES),
    ("packed_bf16_dot", torch.bfloat16),
)


def own(weight: Tensor, bias: Tensor | None, layout: Layout = "packed_f32") -> PackedLinear:
    """Our own layout, whatever the machine prefers."""
    return PackedLinear(pack_as(weight, layout), bias, layout, tuple(weight.shape))


@pytest.fixture
def sums_in_float16(monkeypatch: pytest.MonkeyPatch) -> None:
    """pack_linear packs bfloat16 for sums in float16, whatever the machine prefers."""
    monkeypatch.setenv("VLLM_CPU_GEMM", "packed_fp16")


def packed(backend: str, weight: Tensor, bias: Tensor | None, layout: Layout) -> PackedLinear:
    return pack_linear(weight, bias) if backend == "reference" else own(weight, bias, layout)


@pytest.mark.parametrize("backend", LEVELS)
@pytest.mark.parametrize(("layout", "dtype"), EXACT, ids=str)
@pytest.mark.parametrize(("columns", "inner"), SHAPES)
def test_products(backend: str, layout: Layout, dtype: torch.dtype, columns: int, inner: int) -> None:
    torch.manual_seed(columns)
    inner += inner % 2 if layout == "packed_bf16_dot" else 0
    weight, bias = strided(torch.randn(columns, inner)).to(dtype), torch.randn(columns).to(dtype)
    x = strided(torch.randn(max(ROWS), inner)).to(dtype)
    for own_bias in (None, bias):
        with chosen(backend):
            ready = packed(backend, weight, own_bias, layout)
            for rows in ROWS:
                got = packed_linear(x[:rows], ready)
                assert got.dtype == dtype and got.is_contiguous()
                truth = F.linear(x[:rows].double(), weight.double(), None if own_bias is None else bias.double())
                assert_accurate(backend, got, truth, slack=4e-6)


@pytest.mark.parametrize("backend", CPP_LEVELS)
@pytest.mark.parametrize(("layout", "dtype"), EXACT, ids=str)
def test_rounded_sums(backend: str, layout: Layout, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    weight, x = torch.randn(70, 300).to(dtype), torch.randn(9, 300).to(dtype)
    with chosen(backend):
        ready = own(weight, None, layout)
        assert torch.equal(packed_linear(x, ready, float_out=True).to(dtype), packed_linear(x, ready))


@pytest.mark.parametrize("backend", LEVELS)
@pytest.mark.parametrize("wanted", BFLOAT16_LAYOUTS)
def test_what_is_packed_for_float32_gives_float32(backend: str, wanted: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever multiplies, and whatever the variable names."""
    monkeypatch.setenv("VLLM_CPU_GEMM", wanted)
    torch.manual_seed(0)
    for dtype, with_bias in itertools.product(DTYPES, (False, True)):
        weight, x = torch.randn(70, 300).to(dtype), strided(torch.randn(9, 300)).to(dtype)
        bias = torch.randn(70).to(dtype) if with_bias else None
        truth = F.linear(x.double(), weight.double(), None if bias is None else bias.double())
        with chosen(backend):
            ready = pack_linear(weight, bias, float_out=True)
            for rows in (0, 1, 9):
                got = packed_linear(x[:rows], ready, float_out=True)
                assert got.dtype == torch.float32 and got.is_contiguous()
                assert_accurate(backend, got, truth[:rows], slack=4e-6)


@pytest.mark.parametrize("backend", LEVELS)
def test_an_odd_number_of_values_gives_float32_too(backend: str) -> None:
    torch.manual_seed(0)
    weight, x = torch.randn(40, 33).bfloat16(), torch.randn(3, 33).bfloat16()
    with chosen(backend):
        got = packed_linear(x, pack_linear(weight, None, float_out=True), float_out=True)
    assert_accurate(backend, got, F.linear(x.double(), weight.double()), slack=4e-6)


@pytest.mark.parametrize("backend", CPP_LEVELS)
@pytest.mark.parametrize(("rows", "columns"), [(40, 26240), (130, 8192), (130, 8200)])
def test_results_that_outgrow_the_caches(backend: str, rows: int, columns: int) -> None:
    """They are written past them, if every row begins a cache line."""
    torch.manual_seed(0)
    weight, x = torch.randn(columns, 8).bfloat16(), torch.randn(rows, 8).bfloat16()
    bias = torch.randn(columns).bfloat16()
    with chosen(backend):
        got = packed_linear(x, own(weight, bias), float_out=True)
    assert got.nbytes > 4 * 2**20
    assert_accurate(backend, got, F.linear(x.double(), weight.double(), bias.double()), slack=4e-6)


@pytest.mark.parametrize("backend", CPP_LEVELS)
@pytest.mark.parametrize(("layout", "dtype"), EXACT, ids=str)
@pytest.mark.parametrize("inner", [520, 4100])  # of the longer ones other numbers of rows stay in a cache
def test_a_row_does_not_depend_on_its_batch(backend: str, layout: Layout, dtype: torch.dtype, inner: int) -> None:
    torch.manual_seed(1)
    weight, x = torch.randn(96, inner).to(dtype), torch.randn(300, inner).to(dtype)
    with chosen(backend):
        ready = own(weight, None, layout)
        together = packed_linear(x, ready)
        for rows in (1, 2, 5, 14, 64):
            for first in (0, 17, 236):
                assert torch.equal(packed_linear(x[first : first + rows], ready), together[first : first + rows])


@pytest.mark.parametrize("backend", CPP_LEVELS)
def test_infinities_and_nan_stay_in_their_place(backend: str) -> None:
    weight, x = torch.ones(40, 20), torch.ones(30, 20)
    x[3, 7], x[5, 0] = torch.inf, torch.nan
    weight[33, 2] = -torch.inf
    with chosen(backend):
        got = packed_linear(x, own(weight, None))
    assert torch.equal(got.isnan(), F.linear(x, weight).isnan())
    assert torch.equal(got.isinf(), F.linear(x, weight).isinf())


# How far float16 sums may be off, relative to the root of the summed squares of the products: five times what 16
# roundings of a random walk and two pairwise ones to 11 bits come to.
HALF_SUMS = 5 * 7e-4


@pytest.mark.usefixtures("sums_in_float16")
@pytest.mark.parametrize("backend", CPP_LEVELS)
@pytest.mark.parametrize(("columns", "inner"), SHAPES)
def test_products_summed_in_float16(backend: str, columns: int, inner: int) -> None:
    torch.manual_seed(columns)
    # Each row and each column of its own size, within rows and columns large and small values.
    weight = (torch.randn(columns, inner) * torch.logspace(-10, 15, columns)[:, None]).bfloat16()
    x = torch.randn(max(ROWS), inner) * torch.logspace(12, -12, max(ROWS))[:, None]
    x = strided((x * torch.logspace(-3, 3, inner)[torch.randperm(inner)]).bfloat16())
    bias = torch.randn(columns).bfloat16()
    with chosen(backend):
        ready, biased = pack_linear(weight, None), pack_linear(weight, bias)
        assert ready.layout == "packed_fp16"
        for rows in ROWS:
            got = packed_linear(x[:rows], ready)
            truth = F.linear(x[:rows].double(), weight.double())
            spread = F.linear(x[:rows].double() ** 2, weight.double() ** 2).sqrt()
            allowed = truth.abs() * torch.finfo(torch.bfloat16).eps / 2 + HALF_SUMS * spread
            assert ((got.double() - truth).abs() <= allowed).all()
            whole = packed_linear(x[:rows], biased, float_out=True).double()
            assert ((whole - truth - bias.double()).abs() <= HALF_SUMS * spread + 1e-6 * bias.double().abs()).all()


@pytest.mark.usefixtures("sums_in_float16")
@pytest.mark.parametrize("backend", CPP_LEVELS)
def test_float16_sums_add_little_to_what_rounding_costs(backend: str) -> None:
    torch.manual_seed(3)
    weight, x = torch.randn(320, 1536).bfloat16(), torch.randn(64, 1536).bfloat16()
    truth = F.linear(x.double(), weight.double())
    with chosen(backend):
        got = packed_linear(x, pack_linear(weight, None))
    error, rounding = ((each.double() - truth).pow(2).mean().sqrt() for each in (got, truth.bfloat16()))
    assert error <= 1.12 * rounding


@pytest.mark.usefixtures("sums_in_float16")
@pytest.mark.parametrize("backend", CPP_LEVELS)
def test_a_row_summed_in_float16_does_not_depend_on_its_batch(backend: str) -> None:
    torch.manual_seed(1)
    weight, x = torch.randn(300, 530).bfloat16(), torch.randn(300, 530).bfloat16()
    with chosen(backend):
        ready = pack_linear(weight, None)
        together = packed_linear(x, ready)
        for rows in (1, 2, 3, 5, 7, 13, 14, 64):
            for first in (0, 17, 236):
                assert torch.equal(packed_linear(x[first : first + rows], ready), together[first : first + rows])


@pytest.mark.usefixtures("sums_in_float16")
@pytest.mark.parametrize("backend", CPP_LEVELS)
def test_float16_sums_of_extremes(backend: str) -> None:
    weight, x = torch.ones(40, 200).bfloat16(), torch.ones(30, 200).bfloat16()
    x[3, 7], x[5, 0], x[6, 1], x[7], x[8, 5] = torch.inf, torch.nan, -torch.inf, 0, 1e36
    x[9], x[10], x[11] = 1e-39, 1e30, -3e-30
    weight[33], weight[34], weight[35, 1:] = 0, 3e7, 1e-4
    with chosen(backend):
        got = packed_linear(x, pack_linear(weight, None))
    truth = F.linear(x.double(), weight.double())
    kept = truth.abs() <= torch.finfo(torch.bfloat16).max
    assert torch.equal(got.isfinite(), kept)
    assert torch.allclose(got.double()[kept], truth[kept], rtol=2**-8 + HALF_SUMS, atol=1e-38)


@needs_float16
@pytest.mark.usefixtures("sums_in_float16")
def test_float16_sums_round_each_step_once() -> None:
    """Also where the exact sum is half-way between two numbers but for bits far below."""
    torch.manual_seed(4)
    # So that nothing is scaled: one value of either is in [16, 32).
    x, weight = (torch.rand(size, 2) * 16 + 16 for size in (300, 320))
    x[:, 1] /= 2.0 ** torch.randint(0, 7, (300,))
    weight[:, 0] *= 2.0 ** -torch.randint(0, 18, (320,))
    x, weight = x.bfloat16(), weight.bfloat16()
    first = (x[:, :1].double() @ weight[:, :1].double().T).numpy().astype("float16").astype("float64")
    exact = first + (x[:, 1:].double() @ weight[:, 1:].double().T).numpy()
    got = packed_linear(x, pack_linear(weight, None), float_out=True).numpy()
    assert (got == exact.astype("float16")).all()


@needs_float16
@pytest.mark.usefixtures("sums_in_float16")
def test_usual_rows_keep_float16_sums() -> None:
    """Rows that float16 loses little of are not left to float32, which is half as fast: rows like a layer's
    activations, with an outlier, in a gate's wide range, or with zeros."""
    torch.manual_seed(6)
    weight, x = torch.randn(40, 1536).bfloat16(), torch.randn(6, 1536)
    x[1, 700] = 3000
    x[2] *= torch.randn(1536)
    x[3] *= F.silu(3 * torch.randn(1536))
    x[4, ::3] = 0
    x[5, 1:] = 0
    ready = pack_linear(weight, None)
    halves = packed_linear(x.bfloat16(), ready, float_out=True)
    with chosen("cpp-avx512_bf16"):
        floats = packed_linear(x.bfloat16(), ready, float_out=True)
    assert (halves != floats).any(dim=1).all()


@needs_kernels
@pytest.mark.usefixtures("sums_in_float16")
def test_float16_sums_are_for_bfloat16() -> None:
    assert pack_linear(torch.zeros(40, 200).bfloat16(), None).layout == "packed_fp16"
    assert pack_linear(torch.zeros(40, 200).half(), None).layout == "packed_f32"


@needs_kernels
def test_dot_products_need_an_even_number_of_values(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_CPU_GEMM", "packed_bf16_dot")
    assert pack_linear(torch.zeros(4, 6).bfloat16(), None, float_out=True).layout == "packed_bf16_dot"
    assert pack_linear(torch.zeros(4, 5).bfloat16(), None).layout == "packed_f32"
    for weight, complaint in (
        (torch.zeros(4, 5).bfloat16(), "weight must have an even number of columns .*, got 5"),
        (torch.zeros(4, 6), "weight must have dtype bfloat16 "),
    ):
        with pytest.raises(RuntimeError, match=complaint):
            pack_as(weight, "packed_bf16_dot")


def test_the_width_of_x_is_checked() -> None:
    ready = pack_linear(torch.randn(3, 4), None)
    with pytest.raises(ValueError, match=r"x must be \[T, 4\] for a weight of \(3, 4\), got \(2, 5\)"):
        packed_linear(torch.randn(2, 5), ready)


@pytest.mark.parametrize("backend", LEVELS)
@pytest.mark.parametrize("layout", ["packed_f32", "packed_bf16_dot", "packed_fp16"])
@pytest.mark.parametrize("inner", [1, 16, 40, 100])
def test_gated_products(backend: str, layout: Layout, inner: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_CPU_GEMM", layout)
    torch.manual_seed(inner)
    for dtype in DTYPES:
        weight, bias = torch.randn(2 * inner, 130).to(dtype) / 4, torch.randn(2 * inner).to(dtype)
        x = torch.randn(30, 130).to(dtype)
        for own_bias in (None, bias):
            with chosen(backend):
                ready = pack_linear(weight, own_bias, gated=True)
                assert ready.gated == (backend != "reference")
                got = packed_linear(x, ready)
                got = got if ready.gated else gate_and_mul(got, "silu")
                alone = packed_linear(x[7:8], ready)
                if ready.gated:
                    assert torch.equal(alone, got[7:8])
            whole = F.linear(x.double(), weight.double(), None if own_bias is None else own_bias.double())
            gate, up = whole.chunk(2, dim=1)
            truth = F.silu(gate) * up
            # Both factors count: rounding where they are rounded before they are multiplied, else sums in float16.
            slack = 1e-5 if backend != "reference" and ready.scales is None else torch.finfo(dtype).eps
            assert got.dtype == dtype and got.shape == (30, inner)
            assert_accurate("reference", got, truth, slack=max(slack, 1e-5))


@pytest.mark.parametrize("backend", [level for level in LEVELS if level != "reference"])
@pytest.mark.parametrize("layout", ["packed_f32", "packed_bf16_dot", "packed_fp16"])
@pytest.mark.parametrize("gated", [False, True])
def test_parts_are_packed_as_their_whole(
    backend: str, layout: Layout, gated: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_CPU_GEMM", layout)
    # Rows end between panels, and are of several lengths in memory; columns end between vectors.
    rows = (1, 32, 50, 3) if not gated else (43, 43)
    for dtype in DTYPES:
        parts = [torch.randn(count, 90 + index)[:, :76].to(dtype) for index, count in enumerate(rows)]
        bias = torch.randn(sum(rows)).to(dtype)
        with chosen(backend):
            ready = pack_linear(parts, bias, gated=gated)
            weight, own_bias = unpack_linear(ready, dtype)
            assert ready.shape == (sum(rows), 76) and ready.gated == gated
            if ready.scales is None:
                assert torch.equal(weight, torch.cat(parts))
            assert own_bias is not None and torch.equal(own_bias, bias)
            whole = pack_linear(torch.cat(parts), bias, gated=gated)
            assert torch.equal(ready.weight.view(torch.uint8), whole.weight.view(torch.uint8))


@needs_kernels
def test_parts_of_a_weight_fit_each_other() -> None:
    for parts, said in [
        ([torch.zeros(2, 4), torch.zeros(2, 6)], "weight must have size 4 in dimension 1, got 6"),
        ([torch.zeros(2, 4), torch.zeros(2, 4).half()], "weight must have the dtype of its first part"),
        ([torch.zeros(4, 2).t()], "weight must be contiguous in its last dimension"),
    ]:
        with pytest.raises(RuntimeError, match=said):
            torch.ops.vllm_cpu.pack_linear(parts)
    with pytest.raises(RuntimeError, match="weight must have two halves of rows, got 3"):
        torch.ops.vllm_cpu.pack_int8([torch.zeros(3, 4)], True)


@needs_kernels
def test_a_large_result_takes_the_last_ones_memory() -> None:
    weight, x = torch.randn(2**20, 4), torch.randn(4, 4)
    ready = own(weight, None)
    truth = x.double() @ weight.double().t()

    def product(rows: int) -> Tensor:
        return packed_linear(x[:rows], ready, float_out=True)

    first, second = product(4), product(4)
    assert first.data_ptr() != second.data_ptr()
    place = first.data_ptr()
    del first
    third = product(3)
    assert third.data_ptr() == place
    assert_accurate("cpp", third, truth[:3], slack=4e-6)
    assert_accurate("cpp", second, truth, slack=4e-6)


@pytest.mark.parametrize("backend", LEVELS)
@pytest.mark.parametrize("wanted", BFLOAT16_LAYOUTS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize(("half", "inner"), [(1, 2), (16, 64), (37, 300)])
def test_what_was_packed_comes_back(
    backend: str, wanted: str, dtype: torch.dtype, gated: bool, half: int, inner: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_CPU_GEMM", wanted)
    generator = torch.Generator().manual_seed(half)
    weight = torch.randn(2 * half, inner, generator=generator).to(dtype)
    bias = torch.randn(2 * half, generator=generator).to(dtype)
    weight[0, 0] = 0
    with chosen(backend):
        again, own_bias = unpack_linear(pack_linear(weight.clone(), bias.clone(), gated=gated), dtype)
    assert torch.equal(again, weight)
    assert own_bias is not None and torch.equal(own_bias, bias)
