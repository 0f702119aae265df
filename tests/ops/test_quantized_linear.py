"""quantized_linear: every kind of quantised weight against the product of its definition in float64."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from backends import DTYPES, assert_accurate, chosen, strided
from layouts import CPP_LEVELS, LEVELS, needs_kernels
from torch import Tensor

from vllm.ops.quantized_linear import pack_quantized, quantized_embedding, quantized_linear, take_quantized_rows
from vllm.ops.quantized_tensor import QuantizedTensor, SparseRows, can_concatenate, concatenate, plain_tensor
from vllm.ops.recording import Recording
from vllm.ops.rms_norm import AddedNorm

# Columns, inputs, group size: none a multiple of a panel's 32, or of the codes in a byte.
SHAPES = [(1, 1, 1), (31, 7, 3), (33, 96, 32), (70, 256, 64), (40, 200, 200), (35, 130, 16)]
ROWS = (0, 1, 2, 5, 9, 33)
# float32 sums in another order, and of values from which a multiple of the zero point is taken back.
SLACK = 8e-6


def random_weight(columns: int, inner: int, group: int, kind: str, bits: int = 4) -> QuantizedTensor:
    """A weight as a kind of format stores it, of any values."""
    if bits == 16:
        return plain_tensor(torch.randn(columns, inner).to(getattr(torch, kind)))
    groups = -(-inner // group)
    codes = torch.randint(0, 2**bits, (columns, inner), dtype=torch.uint8)
    scales = (torch.rand(columns, groups) + 0.1) * torch.where(torch.rand(columns, groups) < 0.5, -1, 1)
    weight = QuantizedTensor(codes, bits, scales.half(), group)
    if kind == "plain":
        return weight
    if kind == "zero":
        return replace(weight, zero_points=2 ** (bits - 1), scales=scales.bfloat16())
    if kind == "zeros":
        return replace(weight, zero_points=torch.randint(0, 2**bits + 1, (columns, groups)).to(torch.int16))
    if kind == "offsets":
        return replace(weight, scales=scales, offsets=torch.randn(columns, groups))
    if kind == "half offsets":
        return replace(weight, offsets=torch.randn(columns, groups).half())
    if kind == "table":
        return replace(weight, values=torch.randn(2**bits), scales=scales)
    if kind == "bfloat16 table":
        return replace(weight, values=torch.randn(2**bits).bfloat16().float())
    if kind == "tables":
        return replace(weight, values=torch.randn(columns, 2**bits).half())
    if kind == "super":
        sub = torch.randint(-64, 64, (columns, groups), dtype=torch.int8)
        return replace(weight, scales=sub, super_scales=torch.rand(columns, 1).half() / 64, zero_points=2 ** (bits - 1))
    if kind == "super offsets":
        sub = [torch.randint(0, 64, (columns, groups), dtype=torch.uint8) for _ in range(2)]
        supers = [torch.rand(columns, groups).half() / 64, -torch.rand(columns, groups).half() / 64]
        return replace(weight, scales=sub[0], offsets=sub[1], super_scales=supers[0], super_offsets=supers[1])
    if kind == "e4m3 scales":
        return replace(weight, scales=scales.to(torch.float8_e4m3fn), super_scales=torch.rand(columns, 1))
    if kind == "e8m0 scales":
        bytes_ = torch.randint(120, 132, (columns, groups), dtype=torch.uint8)
        return replace(weight, scales=bytes_.view(torch.float8_e8m0fnu), values=torch.randn(2**bits))
    if kind == "order":
        return replace(weight, input_order=torch.randperm(inner), zero_points=2 ** (bits - 1))
    assert kind == "sparse"
    dense = torch.randn(columns, inner) * (torch.rand(columns, inner) < 0.05)
    return replace(weight, sparse=sparse_rows(dense), input_order=torch.randperm(inner))


def sparse_rows(dense: Tensor) -> SparseRows:
    rows, columns = dense.nonzero(as_tuple=True)
    starts = torch.zeros(len(dense) + 1, dtype=torch.int32)
    starts[1:] = torch.bincount(rows, minlength=len(dense)).cumsum(0)
    return SparseRows(starts, columns.int(), dense[rows, columns])


KINDS = (
    *("plain", "zero", "zeros", "offsets", "half offsets", "table", "tables", "super", "super offsets"),
    *("bfloat16 table", "e4m3 scales", "e8m0 scales", "order", "sparse"),
)
EACH_KIND = [*((kind, 4) for kind in KINDS), *(("zeros", bits) for bits in (2, 3, 5, 6, 8))]
EACH_KIND += [
    ("zero", 5),
    ("zero", 6),
    ("super offsets", 2),
    ("super", 3),
    ("super offsets", 5),
    ("super", 6),
    ("zero", 8),
    ("tables", 3),
]
EACH_KIND += [("float16", 16), ("bfloat16", 16)]
# These columns are not cut between groups of consecutive ones.
NOT_CUT = ("order", "sparse", "float16", "bfloat16")


def float8_weight(columns: int, inner: int, group: int, dtype: torch.dtype) -> QuantizedTensor:
    codes = torch.randn(columns, inner).to(dtype)
    return QuantizedTensor(codes, 8, torch.rand(columns, -(-inner // group)), group)


def value_of(weight: QuantizedTensor, n: int, k: int) -> float:
    """W[n, k] by the definition, number by number; k counts the columns of codes."""
    g = k // weight.group_size

    def of_group(name: str) -> float:
        parts, supers = getattr(weight, name), getattr(weight, f"super_{name}", None)
        if supers is None:
            return parts[n, g].double()
        return parts[n, g].double() * supers[n, g // (weight.num_groups // supers.shape[1])].double()

    value = weight.codes[n, k].double()
    if weight.values is not None:
        table = weight.values if weight.values.dim() == 1 else weight.values[n]
        value = table[int(weight.codes[n, k])].double()
    zero = weight.zero_points if isinstance(weight.zero_points, int) else weight.zero_points[n, g]
    offset = 0.0 if weight.offsets is None else of_group("offsets")
    return float((value - zero) * of_group("scales") + offset)


def truth_of(weight: QuantizedTensor) -> Tensor:
    """float64 [N, K], columns in x's order."""
    columns, inner = weight.shape
    dense = torch.tensor([[value_of(weight, n, k) for k in range(inner)] for n in range(columns)], dtype=torch.float64)
    dense = dense.view(columns, inner)
    if weight.input_order is not None:
        ordered = torch.empty_like(dense)
        ordered[:, weight.input_order] = dense
        dense = ordered
    if weight.sparse is not None:
        starts = weight.sparse.starts.tolist()
        for n in range(columns):
            for i in range(starts[n], starts[n + 1]):
                dense[n, weight.sparse.columns[i]] += weight.sparse.values[i].double()
    return dense


@pytest.mark.parametrize(("kind", "bits"), EACH_KIND)
def test_the_weight_of_a_definition(kind: str, bits: int) -> None:
    torch.manual_seed(0)
    weight = random_weight(5, 37, 8, kind, bits)
    got, truth = weight.dequantize(), truth_of(weight)
    # Two products and a sum, each rounded to float32; an offset may cancel what it is added to.
    torch.testing.assert_close(got.double(), truth, rtol=4e-7, atol=4e-6)


@pytest.mark.parametrize("backend", LEVELS)
@pytest.mark.parametrize(("kind", "bits"), EACH_KIND)
@pytest.mark.parametrize(("columns", "inner", "group"), SHAPES)
def test_products(backend: str, kind: str, bits: int, columns: int, inner: int, group: int) -> None:
    torch.manual_seed(columns)
    check_product(backend, random_weight(columns, inner, group, kind, bits))


@pytest.mark.parametrize("backend", LEVELS)
@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2], ids=str)
@pytest.mark.parametrize(("columns", "inner", "group"), SHAPES)
def test_products_of_float8(backend: str, dtype: torch.dtype, columns: int, inner: int, group: int) -> None:
    torch.manual_seed(columns)
    check_product(backend, float8_weight(columns, inner, group, dtype))


def assert_near(got: Tensor, truth: Tensor, x: Tensor, weight: QuantizedTensor) -> None:
    """Off by a rounding to its dtype, and by what float32 sums may lose of all that is added: products with codes, and
    what their zero points and offsets take back."""
    codes = replace(weight, zero_points=0, offsets=None, super_offsets=None).dequantize()
    added = codes.abs() + (weight.dequantize() - codes).abs()
    allowed = 0.505 * torch.finfo(got.dtype).eps * truth.abs() + 1e-6 * F.linear(x.double().abs(), added.double())
    allowed += 1e-6 * truth.abs() + torch.finfo(got.dtype).smallest_normal
    assert got.shape == truth.shape and ((got.double() - truth).abs() <= allowed).all()


# A part of the root of a row's squared products: sums of 64 in float16, and roundings of the weight's scale, offset and
# value.
HALF_SUMS = 4e-3


def assert_near_in_half(got: Tensor, truth: Tensor, x: Tensor, weight: QuantizedTensor) -> None:
    """As assert_near, of products that were summed in float16."""
    codes = replace(weight, zero_points=0, offsets=None, super_offsets=None).dequantize()
    added = codes.abs() + (weight.dequantize() - codes).abs()
    # A row's only scale is off by 2^-12.
    allowed = (0.505 * torch.finfo(got.dtype).eps + 2**-12) * truth.abs() + torch.finfo(got.dtype).smallest_normal
    allowed += HALF_SUMS * F.linear(x.double() ** 2, added.double() ** 2).sqrt()
    assert got.shape == truth.shape and ((got.double() - truth).abs() <= allowed).all()


def check_product(backend: str, weight: QuantizedTensor) -> None:
    columns, inner = weight.shape
    dense = weight.dequantize().double()
    with chosen(backend):
        packed = pack_quantized(weight, None)
        for dtype in DTYPES:
            check = assert_near_in_half if packed.half and dtype == torch.bfloat16 else assert_near
            bias, x = torch.randn(columns).to(dtype), strided(torch.randn(max(ROWS), inner)).to(dtype)
            unrounded = quantized_linear(x, packed, float_out=True)
            assert unrounded.dtype == torch.float32
            check(unrounded, F.linear(x.double(), dense), x, weight)
            biased = quantized_linear(x, pack_quantized(weight, bias))
            assert biased.dtype == dtype
            check(biased, F.linear(x.double(), dense, bias.double()), x, weight)
            for rows in ROWS if backend != "reference" else ():
                got = quantized_linear(x[:rows], packed)
                assert got.dtype == dtype and got.is_contiguous()
                assert torch.equal(got, unrounded[:rows].to(dtype))


@pytest.mark.parametrize("backend", LEVELS)
@pytest.mark.parametrize(("kind", "bits"), EACH_KIND)
def test_rows(backend: str, kind: str, bits: int) -> None:
    with chosen(backend):
        check_rows(backend, kind, bits)


def check_rows(backend: str, kind: str, bits: int) -> None:
    torch.manual_seed(3)
    weight = random_weight(70, 96, 32, kind, bits)
    dense, rows = weight.dequantize(), torch.tensor([69, 0, 31, 32, 0, 64])
    assert torch.equal(weight.take_rows(rows).dequantize(), dense[rows])
    assert torch.equal(weight.take_rows(slice(10, 40)).dequantize(), dense[10:40])
    bias, x = torch.randn(70), torch.randn(3, 96)
    packed = pack_quantized(weight, bias)
    taken = take_quantized_rows(packed, rows)
    assert taken.shape == (6, 96)
    got, want = quantized_linear(x, taken), quantized_linear(x, packed)[:, rows]
    # The library chooses the order of its sums by the shape, and what cancels in them is as large as the largest.
    close = torch.allclose(got, want, rtol=0, atol=1e-6 * want.abs().max().item())
    assert close if backend == "reference" else torch.equal(got, want)
    for dtype in DTYPES:
        assert torch.equal(quantized_embedding(rows.int(), packed, dtype), dense[rows].to(dtype))


@pytest.mark.parametrize(
    ("kind", "bits"), [pair for pair in EACH_KIND if pair[0] not in ("order", "sparse") and pair[1] < 16]
)
def test_columns(kind: str, bits: int) -> None:
    torch.manual_seed(4)
    weight = random_weight(9, 90, 16, kind, bits)
    dense = weight.dequantize()
    shards = [weight.take_columns(0, 48), weight.take_columns(48, 90)]
    assert torch.equal(torch.cat([shard.dequantize() for shard in shards], dim=1), dense)
    for cut in ((0, 24), (24, 48)):
        with pytest.raises(ValueError, match="cut a group of 16 columns"):
            weight.take_columns(*cut)


def test_columns_of_one_group_a_row_are_any() -> None:
    for weight in (random_weight(9, 90, 90, "offsets"), random_weight(9, 90, 90, "float16", 16)):
        assert torch.equal(weight.take_columns(7, 40).dequantize(), weight.dequantize()[:, 7:40])


def test_columns_in_another_order() -> None:
    weight = random_weight(9, 64, 16, "sparse")
    within = replace(weight, input_order=torch.cat([torch.randperm(32) + 32, torch.randperm(32)]))
    assert torch.equal(within.take_columns(0, 32).dequantize(), within.dequantize()[:, :32])
    assert torch.equal(within.take_columns(32, 64).dequantize(), within.dequantize()[:, 32:])
    with pytest.raises(ValueError, match=r"columns \[0, 32\) are not consecutive in input_order"):
        replace(weight, input_order=torch.arange(64).view(2, 32).T.flatten()).take_columns(0, 32)


def test_super_groups_are_cut_between_groups() -> None:
    for kind in ("super", "super offsets"):
        weight = random_weight(9, 64, 8, kind)
        supers = {
            name: torch.rand(9, 2) for name in ("super_scales", "super_offsets") if getattr(weight, name) is not None
        }
        weight = replace(weight, **supers)
        for start, stop in ((32, 64), (0, 16), (24, 64)):
            assert torch.equal(weight.take_columns(start, stop).dequantize(), weight.dequantize()[:, start:stop])
        with pytest.raises(ValueError, match="cut a group of 8 columns"):
            weight.take_columns(0, 20)


@pytest.mark.parametrize("backend", LEVELS)
@pytest.mark.parametrize(("kind", "bits"), EACH_KIND)
def test_several_weights_in_one(backend: str, kind: str, bits: int) -> None:
    weights = [random_weight(rows, 96, 32, kind, bits) for rows in (5, 40, 1)]
    order = weights[0].input_order
    weights = [replace(weight, input_order=order) for weight in weights]
    dense = torch.cat([weight.dequantize() for weight in weights])
    assert can_concatenate(weights)
    assert torch.equal(concatenate(weights).dequantize(), dense)
    x = torch.randn(3, 96)
    with chosen(backend):
        got = quantized_linear(x, pack_quantized(weights, None))
    assert_accurate("cpp", got, F.linear(x.double(), dense.double()), slack=SLACK)


@pytest.mark.parametrize("backend", LEVELS)
def test_weights_of_several_formats_in_one_product(backend: str) -> None:
    torch.manual_seed(5)
    weights = [random_weight(20, 96, 32, "zeros"), random_weight(33, 96, 16, "super", 6)]
    weights.append(random_weight(7, 96, 96, "float16", 16))
    assert not can_concatenate(weights)
    with pytest.raises(ValueError, match="must agree: bits: 4, 6, 16"):
        concatenate(weights)
    x, bias = torch.randn(3, 96), torch.randn(60)
    dense = torch.cat([weight.dequantize() for weight in weights]).double()
    with chosen(backend):
        packed = pack_quantized(weights, bias)
        got = quantized_linear(x, packed)
    assert_accurate("cpp", got, F.linear(x.double(), dense, bias.double()), slack=SLACK)
    with pytest.raises(ValueError, match="rows can be taken of a weight in one format"):
        take_quantized_rows(packed, torch.tensor([1]))


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"bits": 7}, "bits must be one of 2, 3, 4, 5, 6, 8, 16, got 7"),
        ({"group_size": 0}, r"group_size must be in \[1, 64\]"),
        ({"scales": torch.ones(5, 3)}, r"scales must be \[5, 4\] for codes of \[5, 64\], got \[5, 3\]"),
        ({"zero_points": torch.ones(5, 1)}, r"zero_points must be \[5, 4\]"),
        ({"offsets": torch.ones(4, 4)}, r"offsets must be \[5, 4\]"),
        ({"values": torch.ones(15)}, r"values must be \[16\] or \[5, 16\], got \[15\]"),
        ({"super_scales": torch.ones(5, 3)}, r"super_scales must be \[5, a divisor of 4\], got \[5, 3\]"),
        ({"super_offsets": torch.ones(5, 2)}, "super_offsets need offsets"),
        ({"input_order": torch.arange(5)}, r"input_order must be \[64\], got \[5\]"),
        ({"codes": torch.zeros(5, 64)}, "codes must be uint8 of at most 8 bits, .*, got torch.float32 of 4"),
        ({"bits": 16}, "codes must be uint8 of at most 8 bits, .*, got torch.uint8 of 16"),
    ],
)
def test_what_does_not_fit_is_named(changes: dict, complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        replace(random_weight(5, 64, 16, "plain"), **changes)


@needs_kernels
@pytest.mark.parametrize(
    ("weight", "num_bytes"),
    [
        # Bytes that the files have for 64 rows of 256.
        (lambda: random_weight(64, 256, 32, "zeros"), 64 * 256 // 32 * 18.5),
        (lambda: random_weight(64, 256, 32, "half offsets"), 64 * 256 // 32 * 20),
        (lambda: random_weight(64, 256, 32, "zero", 8), 64 * 256 // 32 * 34),
        (lambda: random_weight(64, 256, 16, "super", 6), 64 * 210),
        (lambda: random_weight(64, 256, 16, "super", 3), 64 * 110),
        (lambda: k_quant(2), 64 * 84),
        (lambda: k_quant(4), 64 * 144),
        (lambda: k_quant(5), 64 * 176),
        (lambda: random_weight(64, 256, 256, "float16", 16), 64 * 256 * 2),
    ],
    ids=["GPTQ", "Q4_1", "Q8_0", "Q6_K", "Q3_K", "Q2_K", "Q4_K", "Q5_K", "F16"],
)
def test_packed_bytes_are_near_the_file_s(weight: Callable[[], QuantizedTensor], num_bytes: float) -> None:
    with chosen("cpp"):
        packed = pack_quantized(weight(), None)
    assert packed.nbytes <= 1.07 * num_bytes


def k_quant(bits: int) -> QuantizedTensor:
    """64 rows of 256: Q2_K, Q4_K or Q5_K."""
    groups, most = (16, 16) if bits == 2 else (8, 64)
    sub = [torch.randint(0, most, (64, groups), dtype=torch.uint8) for _ in range(2)]
    supers = [torch.rand(64, 1).half(), -torch.rand(64, 1).half()]
    codes = torch.randint(0, 2**bits, (64, 256), dtype=torch.uint8)
    return QuantizedTensor(
        *(codes, bits, sub[0], 256 // groups), offsets=sub[1], super_scales=supers[0], super_offsets=supers[1]
    )


@needs_kernels
@pytest.mark.parametrize("bits", [4, 5, 6, 8])
def test_float16_sums_add_little_to_what_rounding_costs(bits: int) -> None:
    """Where the CPU sums bfloat16 products in float16, as of unquantised weights."""
    torch.manual_seed(11)
    weight = random_weight(320, 1536, 32, "zero", bits)
    x = torch.randn(64, 1536).bfloat16()
    truth = F.linear(x.double(), weight.dequantize().double())
    with chosen("cpp"):
        got, head = (quantized_linear(x, pack_quantized(weight, None, float_out=out), out) for out in (False, True))
    error, rounding = ((each.double() - truth).pow(2).mean().sqrt() for each in (got, truth.bfloat16()))
    assert error <= 1.12 * rounding
    # Results that are read in float32 are summed in it.
    assert (head.double() - truth).pow(2).mean().sqrt() < 1e-3 * rounding


@pytest.mark.parametrize("backend", LEVELS)
def test_scales_and_offsets_of_four_bits(backend: str) -> None:
    torch.manual_seed(6)
    check_product(backend, k_quant(2))


@pytest.mark.parametrize("backend", CPP_LEVELS)
@pytest.mark.parametrize(("kind", "bits"), EACH_KIND)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_row_does_not_depend_on_its_batch(backend: str, kind: str, bits: int, dtype: torch.dtype) -> None:
    torch.manual_seed(7)
    weight, x = random_weight(100, 320, 64, kind, bits), torch.randn(150, 320).to(dtype)
    with chosen(backend):
        packed = pack_quantized(weight, None)
        together = quantized_linear(x, packed, float_out=True)
        for rows in (1, 2, 3, 4, 5, 7, 14, 64):
            for first in (0, 17, 86):
                alone = quantized_linear(x[first : first + rows], packed, float_out=True)
                assert torch.equal(alone, together[first : first + rows])


@pytest.mark.parametrize("backend", CPP_LEVELS)
@pytest.mark.parametrize("kind", ["zeros", "table"])
@pytest.mark.parametrize("inner", [3, 16, 37])
def test_gated_products(backend: str, kind: str, inner: int) -> None:
    torch.manual_seed(inner)
    weight = random_weight(2 * inner, 96, 32, kind)
    weight = replace(weight, scales=weight.scales / 16)
    for dtype in DTYPES:
        bias, x = torch.randn(2 * inner).to(dtype), torch.randn(20, 96).to(dtype)
        with chosen(backend):
            packed = pack_quantized(weight, bias, gated=True)
            assert packed.gated
            got = quantized_linear(x, packed, float_out=True)
            assert torch.equal(quantized_linear(x[7:8], packed, float_out=True), got[7:8])
        gate, up = F.linear(x.double(), weight.dequantize().double(), bias.double()).chunk(2, dim=1)
        # Both factors have their errors, and the exponential one of its own.
        slack = 4 * HALF_SUMS if packed.half and dtype == torch.bfloat16 else 4 * SLACK
        assert_accurate("cpp", got, F.silu(gate) * up, slack=slack)


@pytest.mark.parametrize("backend", CPP_LEVELS)
def test_norms_before_products(backend: str) -> None:
    torch.manual_seed(8)
    weights = [random_weight(20, 96, 96, "float16", 16), random_weight(33, 96, 16, "super", 6)]
    x, residual, scale = (torch.randn(*size).bfloat16() for size in ((5, 96), (5, 96), (96,)))
    with chosen(backend):
        for each in (weights[:1], weights):
            packed = pack_quantized(each, None)
            summed = residual.clone()
            got = quantized_linear(x, packed, norm=AddedNorm(summed, scale, 1e-5))
            again = residual.clone()
            assert torch.equal(got, quantized_linear(AddedNorm(again, scale, 1e-5)(x), packed))
            assert torch.equal(summed, again)


@needs_kernels
def test_what_the_kernels_do_not_know_takes_the_reference() -> None:
    torch.manual_seed(9)
    not_a_number = float8_weight(5, 32, 16, torch.float8_e4m3fn)
    not_a_number.codes.view(torch.uint8)[0, 0] = 0x7F
    x = torch.randn(2, 32)
    wide_table = random_weight(5, 32, 16, "table", 6)
    with chosen("cpp"):
        assert quantized_linear(x, pack_quantized(not_a_number, None)).isnan().tolist() == [[True] + [False] * 4] * 2
        got = quantized_linear(x, pack_quantized(wide_table, None))
    assert_accurate("cpp", got, F.linear(x.double(), wide_table.dequantize().double()), slack=SLACK)


@needs_kernels
def test_recorded_products_run_again() -> None:
    torch.manual_seed(10)
    weights = [random_weight(20, 96, 32, "zeros"), random_weight(33, 96, 16, "super", 6)]
    x, ids = torch.randn(2, 96).bfloat16(), torch.tensor([3, 19], dtype=torch.int32)
    with chosen("cpp"):
        both, one = pack_quantized(weights, None), pack_quantized(weights[0], None)
        with Recording() as recording:
            got, rows = quantized_linear(x, both), quantized_embedding(ids, one, torch.bfloat16)
        assert not recording.missed
        x.copy_(torch.randn(2, 96))
        ids.copy_(torch.tensor([0, 7]))
        recording.replay()
        assert torch.equal(got, quantized_linear(x, both))
        assert torch.equal(rows, quantized_embedding(ids, one, torch.bfloat16))


def test_the_width_of_x_is_checked() -> None:
    packed = pack_quantized(random_weight(3, 4, 4, "plain"), None)
    with pytest.raises(ValueError, match=r"x must be \[T, 4\] for a weight of \(3, 4\), got \(2, 5\)"):
        quantized_linear(torch.randn(2, 5), packed)


@pytest.mark.parametrize("backend", LEVELS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("rows", [1, 3, 9])
def test_large_values_beside_small_ones(backend: str, dtype: torch.dtype, rows: int) -> None:
    """The sums err by what float32 sums of the large values do, not more."""
    torch.manual_seed(5)
    weight = random_weight(40, 96, 32, "zero", 8)
    x = torch.randn(rows, 96)
    x[:, ::7] *= 300.0
    x[:, 1::5] *= 1e-3
    x = x.to(dtype)
    with chosen(backend):
        got = quantized_linear(x, pack_quantized(weight, None), float_out=True)
    dense = weight.dequantize().double()
    bound = 2.0**-19 * (x.double().abs() @ dense.abs().T)
    assert ((got.double() - x.double() @ dense.T).abs() <= bound).all()


@needs_kernels
def test_memory_of_weights_is_whose_it_is() -> None:
    new_weight = torch.ops.vllm_cpu.new_weight
    sizes = (0, 1, 100, 4096, 40 * 2**20, 3, 20 * 2**20, 64)
    parts = [new_weight(size) for size in sizes]
    for number, part in enumerate(parts):
        assert part.data_ptr() % 64 == 0
        part.fill_(number)
    del parts[1::2]
    assert all((part == 2 * index).all() for index, part in enumerate(parts))
    with pytest.raises(RuntimeError, match="bytes must not be negative, got -1"):
        new_weight(-1)
