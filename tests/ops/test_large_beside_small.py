"""Every product, norm and attention over rows of values like 500 beside 1e-4: sums err by what float32 sums of the
large ones do, whatever a level multiplies usual rows with."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from backends import backends, chosen, run, weights_rounding
from layouts import CPP_LEVELS, LEVELS
from test_packed_attention import starts_of
from test_packed_attention import truth as attend
from test_paged_attention import attend as attend_paged
from test_paged_attention import make_batch
from test_quantized_linear import EACH_KIND, float8_weight, random_weight
from torch import Tensor

from vllm.ops.gate_and_mul import gate_and_mul
from vllm.ops.packed_attention import packed_attention
from vllm.ops.packed_linear import pack_linear, packed_linear
from vllm.ops.quantized_linear import PackedQuantized, pack_quantized, quantized_linear
from vllm.ops.quantized_tensor import QuantizedTensor
from vllm.ops.rms_norm import AddedNorm, fused_add_rms_norm_, rms_norm

HALVES = (torch.bfloat16, torch.float16)
LAYOUTS = ("packed_f32", "packed_bf16_dot", "packed_fp16")
# A part of the sum of all products' magnitudes.
SUMS = 2.0**-19
# PyTorch's attention, and Triton's in the interpreter, round weights to the working dtype.
CPP_BACKENDS = [each for each in backends("paged_attention") if each.startswith("cpp")]
# Within a sum of 64 in float16, several of them and a part of one, a block's tail.
WIDTHS = (40, 96, 602)


def large_beside_small(rows: int, inner: int) -> Tensor:
    x = torch.randn(rows, inner)
    x[:, ::7] *= 300.0
    x[:, 1::5] *= 1e-3
    return x


def among_usual_ones(rows: int, inner: int) -> Tensor:
    """Every third row has large values."""
    x = torch.randn(rows, inner)
    x[::3] = large_beside_small(len(x[::3]), inner)
    return x


def assert_near(got: Tensor, truth: Tensor, sums: Tensor) -> None:
    """`sums`: of the magnitudes of all that is added."""
    rounding = 0.505 * torch.finfo(got.dtype).eps * truth.abs() if got.dtype != torch.float32 else 0.0
    assert ((got.double() - truth).abs() <= SUMS * sums + rounding).all()


def added(weight: QuantizedTensor) -> Tensor:
    """float64 [N, K]: magnitudes of products with codes, and of what zero points and offsets take back."""
    codes = replace(weight, zero_points=0, offsets=None, super_offsets=None).dequantize().double()
    return codes.abs() + (weight.dequantize().double() - codes).abs()


@pytest.mark.parametrize("backend", LEVELS)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("inner", WIDTHS)
def test_plain_products(backend: str, layout: str, inner: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_CPU_GEMM", layout)
    torch.manual_seed(inner)
    for dtype in (torch.float32, *HALVES):
        weight, x = torch.randn(70, inner).to(dtype), large_beside_small(40, inner).to(dtype)
        truth, sums = x.double() @ weight.double().T, x.double().abs() @ weight.double().abs().T
        with chosen(backend):
            packed = pack_linear(weight, None)
            for rows in (1, 3, 9, 40):
                assert_near(packed_linear(x[:rows], packed), truth[:rows], sums[:rows])
                if backend != "reference":
                    assert_near(packed_linear(x[:rows], packed, float_out=True), truth[:rows], sums[:rows])


@pytest.mark.parametrize("backend", LEVELS)
@pytest.mark.parametrize(("kind", "bits"), [*EACH_KIND, ("e4m3", 8), ("e5m2", 8)])
def test_quantised_products(backend: str, kind: str, bits: int) -> None:
    torch.manual_seed(bits)
    float8 = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}.get(kind)
    for columns, inner, group in ((70, 96, 32), (33, 200, 50)):
        if float8 is not None:
            weight = float8_weight(columns, inner, group, float8)
        else:
            weight = random_weight(columns, inner, group, kind, bits)
        dense, magnitudes = weight.dequantize().double(), added(weight)
        for dtype in (torch.float32, *HALVES):
            x = large_beside_small(40, inner).to(dtype)
            truth, sums = x.double() @ dense.T, x.double().abs() @ magnitudes.T
            if dtype != torch.float32:
                # Digits keep 2^-21 of the greatest value beside one: where codes of the great ones are 0, it shows.
                sums += x.double().abs().amax(1, keepdim=True) / 4 * magnitudes.sum(1)
            with chosen(backend):
                packed = pack_quantized(weight, None)
                for rows in (1, 3, 9, 40):
                    got = quantized_linear(x[:rows], packed, float_out=True)
                    assert_near(got, truth[:rows], sums[:rows])


@pytest.mark.parametrize("backend", CPP_LEVELS)
@pytest.mark.parametrize("layout", [*LAYOUTS, "quantised"])
@pytest.mark.parametrize("gated", [False, True])
def test_they_do_not_touch_their_neighbours(
    backend: str, layout: str, gated: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A row's bits are its own, beside usual ones, beside others of its kind, alone, and after a norm."""
    if layout != "quantised":
        monkeypatch.setenv("VLLM_CPU_GEMM", layout)
    torch.manual_seed(1)
    weight, bias = random_weight(80, 130, 16, "super", 6), torch.randn(80).bfloat16()
    x, residual, scale = among_usual_ones(301, 130).bfloat16(), torch.randn(301, 130).bfloat16(), torch.randn(130)
    # The norm makes them: all rows have large values then.
    scale[::7] *= 300
    with chosen(backend):
        if layout == "quantised":
            packed = pack_quantized(weight, bias, gated=gated)
        else:
            packed = pack_linear(weight.dequantize().bfloat16(), bias, gated=gated)
        multiply = quantized_linear if isinstance(packed, PackedQuantized) else packed_linear
        together = multiply(x, packed)
        for rows in (1, 2, 5, 40):
            for first in (0, 1, 47, 260):
                assert torch.equal(multiply(x[first : first + rows], packed), together[first : first + rows])
        for norm_weight in (scale, scale.bfloat16(), torch.ones(130)):
            apart, fused = residual.clone(), residual.clone()
            expected = multiply(fused_add_rms_norm_(x, apart, norm_weight, 1e-5), packed)
            assert torch.equal(multiply(x, packed, norm=AddedNorm(fused, norm_weight, 1e-5)), expected)
            assert torch.equal(fused, apart)


@pytest.mark.parametrize("backend", LEVELS)
@pytest.mark.parametrize("layout", [*LAYOUTS, "quantised"])
def test_sums_beyond_float16(backend: str, layout: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sums that are finite in float32, of values and weights as near as can be to what a level scales them to: below a
    power of two, of one sign. What cancels afterwards leaves what it left in float32."""
    if layout != "quantised":
        monkeypatch.setenv("VLLM_CPU_GEMM", layout)
    x = torch.full((5, 192), 255.0)
    x[1:, ::2], x[2] = -255.0, 2.0**60 - 2.0**52
    x[3, 96:], x[4] = x[3, :96], 65280.0
    codes = torch.full((40, 192), 15, dtype=torch.uint8)
    # Around 16, some of which float16 rounds up to it.
    weight = QuantizedTensor(codes, 4, torch.linspace(1.06, 1.07, 40)[:, None], 192)
    for dtype in HALVES:
        values = x.to(dtype)[[0, 1, 3, 4]] if dtype == torch.float16 else x.to(dtype)
        with chosen(backend):
            if layout == "quantised":
                dense, packed = weight.dequantize(), pack_quantized(weight, None)
                got = quantized_linear(values, packed, float_out=True)
            else:
                dense = weight.dequantize().bfloat16().to(dtype)
                packed = pack_linear(dense, None, float_out=backend == "reference")
                got = packed_linear(values, packed, float_out=True)
        truth = values.double() @ dense.double().T
        # These are usual rows: float16 sums, all of whose 18 roundings may go one way.
        allowed = 2.0**-8 * values.double().abs() @ dense.double().abs().T
        assert got.isfinite().all() and ((got.double() - truth).abs() <= allowed).all()


@pytest.mark.parametrize("backend", CPP_BACKENDS)
@pytest.mark.parametrize("dtype", [torch.float32, *HALVES], ids=str)
def test_attention(backend: str, dtype: torch.dtype) -> None:
    """Large keys meet small queries, and large values small ones."""
    torch.manual_seed(2)
    lengths = [1, 7, 70]
    q, k, v = torch.randn(78, 4, 32), torch.randn(78, 2, 32), torch.randn(78, 2, 32)
    q[..., ::7] *= 1e-3
    k[..., ::7] *= 300
    v[::7] *= 300
    v[1::5] *= 1e-3
    q, k, v = q.to(dtype), k.to(dtype), v.to(dtype)
    starts, scale = starts_of(lengths), 32**-0.5
    got = run(backend, packed_attention, q, k, v, starts, scale)
    # Scores are off by roundings of sums of about 30, and weights by as much, or by their own rounding.
    slack = 64 + weights_rounding(backend, dtype) / SUMS
    assert_near(got, attend(q, k, v, starts, scale), slack * attend(q, k, v.abs(), starts, scale))


@pytest.mark.parametrize("backend", CPP_BACKENDS)
@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_attention_over_the_cache(backend: str, dtype: torch.dtype) -> None:
    batch = make_batch([(1, 70), (3, 40), (40, 40)], dtype, head_dim=32)
    batch.q[..., ::7] *= 300
    got, truth = batch.run(backend), attend_paged(batch)
    # Results are below 4; weights that are rounded move a sum of values of about 1 by less than an eps.
    assert (got.double() - truth).abs().max() <= 2.0**-7 + weights_rounding(backend, dtype)


@pytest.mark.parametrize("backend", ["reference", *CPP_BACKENDS])
@pytest.mark.parametrize("dtype", [torch.float32, *HALVES], ids=str)
def test_norms_and_gates(backend: str, dtype: torch.dtype) -> None:
    """Small values keep their bits."""
    torch.manual_seed(3)
    x, weight = large_beside_small(5, 602).to(dtype), torch.randn(602).to(dtype)
    wide = x.double()
    normed = wide * (wide.square().mean(1, keepdim=True) + 1e-5).rsqrt() * weight.double()
    least = max(1e-37, torch.finfo(dtype).smallest_normal)
    slack = 0.505 * torch.finfo(dtype).eps + 1e-6
    got = run(backend, rms_norm, x, weight, 1e-5).double()
    assert ((got - normed).abs() <= slack * normed.abs() + least).all()
    # Exponentials below the least float are test_gate_and_mul.py's.
    x[:, :301].clamp_(min=-20)
    gate, up = x.double().chunk(2, dim=1)
    truth = F.silu(gate) * up
    got = run(backend, gate_and_mul, x, "silu").double()
    kept = truth.abs() <= torch.finfo(dtype).max
    assert ((got - truth).abs() <= slack * truth.abs() + least)[kept].all()
