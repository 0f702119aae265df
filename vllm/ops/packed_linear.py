"""Matrix products with weights that never change, packed once into the layout the CPU multiplies fastest."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from vllm import envs
from vllm.ops._dispatch import ISA_LEVELS, cpu_ops, implementation
from vllm.ops.add_lora import AddedAdapters
from vllm.ops.float_linear import float_linear
from vllm.ops.invariant_linear import has_invariant_linear, invariant_linear
from vllm.ops.rms_norm import NO_NORM, AddedNorm
from vllm.utils.host_memory import scratch

Layout = Literal["plain", "packed_f32", "packed_bf16_dot", "packed_fp16"]

# Layouts of our kernel; the first two hold the weight's values unchanged.
EXACT: tuple[Layout, ...] = ("packed_f32", "packed_bf16_dot")
OWN: tuple[Layout, ...] = (*EXACT, "packed_fp16")

# Columns of a panel: what a packed weight consists of.
PANEL = 32
# Columns that are unpacked at once.
_UNIT_VECTORS = 256
# A column's greatest magnitude in float16: see HalfProduct in csrc/cpu/half_product.h.
_COLUMN_EXPONENT = 4


@dataclass
class PackedLinear:
    """A weight ready to multiply with.

    Attributes:
        weight: [N, K] when the layout is "plain", else opaque.
        bias: [N] or None.
        layout: "plain" or one of our kernel's (csrc/cpu/kernels/linear.cpp).
        shape: (N, K).
        scales: float32 [N, filled up to whole panels], the factors of "packed_fp16" products; else None.
        gated: the product is silu(x G^T + b) * (x U^T + c), where G and U are the weight's two halves of rows.
    """

    weight: Tensor
    bias: Tensor | None
    layout: Layout
    shape: tuple[int, int]
    scales: Tensor | None = None
    gated: bool = False


def pack_linear(
    weight: Tensor | Sequence[Tensor], bias: Tensor | None, float_out: bool = False, gated: bool = False
) -> PackedLinear:
    """Take a weight [N, K], whole or as parts of its rows, and a bias [N] over. `weight` is copied when packing changes
    its layout, or joins parts.

    Our own kernel adds each output's products in one order, so a row's results do not depend on the batch.
    "packed_f32" multiplies in float32. bfloat16 weights become "packed_bf16_dot" where the CPU has matrix tiles or fast
    dot products of bfloat16, and "packed_fp16" where it has float16 arithmetic alone: the same values, scaled, whose
    products are summed in float16 up to 64 at a time. VLLM_CPU_GEMM overrides the choice.

    Args:
        float_out: the products will be read in float32, so the layout is one that sums and gives them so.
        gated: multiply to silu(x G^T + b) * (x U^T + c) at once, if the layout can: the result's `gated` tells.

    Raises:
        ValueError: VLLM_CPU_GEMM is no layout.
    """
    shape = shape_of(weight)
    layout = _layout(weight if isinstance(weight, Tensor) else weight[0], float_out)
    gated = gated and layout in OWN
    if gated and bias is not None:
        bias = interleave_gate(bias)
    scales = None
    if layout == "packed_fp16":
        whole = joined(weight)
        whole, scales = _scaled_fp16(interleave_gate(whole) if gated else whole)
        packed = pack_as(whole, layout)
    else:
        packed = pack_as(weight, layout, gated) if layout in OWN else joined(weight)
    return PackedLinear(packed, bias, layout, shape, scales, gated)


def shape_of(weight: Tensor | Sequence[Tensor]) -> tuple[int, int]:
    """(N, K) of a weight that may be given in parts of its rows."""
    parts = [weight] if isinstance(weight, Tensor) else weight
    return sum(map(len, parts)), parts[0].shape[1]


def joined(weight: Tensor | Sequence[Tensor]) -> Tensor:
    """The weight [N, K], in memory of its own if it was given in parts."""
    if isinstance(weight, Tensor):
        return weight
    return torch.cat(list(weight), out=scratch.empty(weight[0], *shape_of(weight)))


def pack_as(weight: Tensor | Sequence[Tensor], layout: Layout, gated: bool = False) -> Tensor:
    """The memory of our kernel's `layout` with the values of a weight [N, K], or of parts of its rows; K is even for
    "packed_bf16_dot". `gated`: rows are ordered as by `interleave_gate`."""
    parts = [weight] if isinstance(weight, Tensor) else weight
    return torch.ops.vllm_cpu.pack_linear(parts, layout == "packed_bf16_dot", gated)


def packed_linear(
    x: Tensor,
    packed: PackedLinear,
    float_out: bool = False,
    norm: AddedNorm | None = None,
    adapters: AddedAdapters | None = None,
) -> Tensor:
    """x W^T + bias, [T, N], or [T, N / 2] when `packed.gated`; contiguous, in x's dtype or float32.

    `x` is [T, K], of the weight's dtype, with any strides. `float_out` gives the float32 sums, not rounded to x's
    dtype; the weight was packed for it. `norm` is applied to x first, which is added to the norm's residual in place;
    the bits are those of a separate norm, but our kernel does not write its result to memory. `adapters`, of layouts in
    OWN alone, are added to float32 sums, before the gate; rows without one have the same bits as without the argument.
    ValueError: the width of x is not K.
    """
    if x.shape[-1] != packed.shape[1]:
        raise ValueError(f"x must be [T, {packed.shape[1]}] for a weight of {packed.shape}, got {tuple(x.shape)}")
    if packed.layout in OWN:
        columns = packed.shape[0] // 2 if packed.gated else packed.shape[0]
        return torch.ops.vllm_cpu.linear(
            *(x, packed.weight, packed.bias, columns, float_out, packed.scales, packed.gated, *(norm or NO_NORM)),
            *((None, 0, *adapters) if adapters else ()),
        )
    assert adapters is None
    if norm is not None:
        x = norm(x)
    if has_invariant_linear(x):
        return invariant_linear(x, packed.weight, packed.bias, float_out)
    if not float_out:
        return F.linear(x, packed.weight, packed.bias)
    sums = float_linear(x, packed.weight)
    return sums if packed.bias is None else sums.add_(packed.bias)


def take_packed_rows(packed: PackedLinear, rows: Tensor) -> PackedLinear:
    """The weight W[rows] [I, K] and its bias, packed as `packed` (of W [N, K]) is, in memory of its own.

    A product by our kernel gives the very bits of the whole product's columns; "plain" ones may differ in rounding,
    as libraries choose the order of their sums by the shape. `rows` are int64 [I] in [0, N), on the weight's device, in
    any order and not necessarily distinct. ValueError for a layout other than "plain" and EXACT.
    """
    if packed.layout == "plain":
        weight = packed.weight[rows]
    else:
        weight = pack_as(packed_embedding(rows, packed), packed.layout)
    bias = None if packed.bias is None else packed.bias[rows]
    return PackedLinear(weight, bias, packed.layout, (len(rows), packed.shape[1]))


def unpack_linear(packed: PackedLinear, dtype: torch.dtype) -> tuple[Tensor, Tensor | None]:
    """The weight [N, K] and the bias [N] that were packed, of `dtype`, the weight's own. Products with unit vectors add
    zeros to one value of a column, so that they are exact."""
    rows, width = packed.shape
    if packed.layout == "plain":
        return packed.weight, packed.bias
    half = rows // 2
    # Two halves by 16 rows in turn, filled up: see interleave_gate.
    wide = 2 * (PANEL // 2) * -(-half // (PANEL // 2)) if packed.gated else rows
    product = replace(packed, shape=(wide, width), bias=None, gated=False)
    weight = torch.empty(wide, width, dtype=dtype)
    for start in range(0, width, _UNIT_VECTORS):
        stop = min(start + _UNIT_VECTORS, width)
        units = torch.zeros(stop - start, width, dtype=dtype)
        units[:, start:stop].fill_diagonal_(1)
        weight[:, start:stop] = packed_linear(units, product).T
    if not packed.gated:
        return weight, packed.bias
    return separate_gate(weight, half), None if packed.bias is None else separate_gate(packed.bias, half)


def packed_embedding(token_ids: Tensor, packed: PackedLinear) -> Tensor:
    """[T, H]: the rows of a packed weight [V, H] that `token_ids` (int32 or int64 [T] in [0, V), contiguous) name, to
    the bit. ValueError for a layout other than EXACT."""
    if packed.layout not in EXACT:
        raise ValueError(f"packed must have one of the layouts {', '.join(EXACT)}, got {packed.layout!r}")
    return torch.ops.vllm_cpu.panel_rows(packed.weight, token_ids, packed.shape[0])


def _layout(weight: Tensor, float_out: bool) -> Layout:
    if implementation(weight) != "cpp":
        return "plain"
    if weight.dtype != torch.bfloat16:
        return "packed_f32"
    layout = bf16_layout(float_out)
    return "packed_f32" if layout == "packed_bf16_dot" and weight.shape[1] % 2 else layout


def bf16_layout(float_out: bool) -> Layout:
    """The layout that VLLM_CPU_GEMM names, else the one that the CPU multiplies bfloat16 by fastest."""
    ops = cpu_ops()
    assert ops is not None
    usable = EXACT if float_out else OWN
    named = envs.cpu_gemm()
    if named in usable:
        return cast(Layout, named)
    level = ISA_LEVELS[ops.set_isa(-1)]
    fastest: tuple[tuple[bool, Layout], ...] = (
        (level == "amx" or ops.has_fast_bf16_dot(), "packed_bf16_dot"),
        (level == "avx512_fp16", "packed_fp16"),
    )
    return next((layout for suits, layout in fastest if suits and layout in usable), "packed_f32")


def sums_in_float16(float_out: bool) -> bool:
    """Whether our kernel multiplies bfloat16 best as "packed_fp16", and neither VLLM_CPU_GEMM nor `float_out` (see
    pack_linear) rules that out."""
    return cpu_ops() is not None and bf16_layout(float_out) == "packed_fp16"


def interleave_gate(stacked: Tensor) -> Tensor:
    """[2 I, ...] -> the same rows by 16 of the first half and 16 of the second in turn, zeros after either's last."""
    parts = stacked.unflatten(0, (2, -1))
    missing = -parts.shape[1] % (PANEL // 2)
    if missing:
        parts = torch.cat([parts, parts.new_zeros(2, missing, *parts.shape[2:])], dim=1)
    turned = parts.unflatten(1, (-1, PANEL // 2)).transpose(0, 1)
    return scratch.empty(stacked, *turned.shape).copy_(turned).flatten(0, 2)


def separate_gate(interleaved: Tensor, half: int) -> Tensor:
    """`interleave_gate` undone; `half`: rows of either half."""
    parts = interleaved.unflatten(0, (-1, 2, PANEL // 2)).transpose(0, 1).flatten(1, 2)
    return parts[:, :half].flatten(0, 1).contiguous()


def _scaled_fp16(weight: Tensor) -> tuple[Tensor, Tensor]:
    """bfloat16 [N, K] -> float16 [N, K], and float32 [N up to whole panels] that undoes its scaling."""
    plain = weight.float()
    _, exponents = plain.abs().amax(dim=1).frexp()
    # Within what a float32 can scale by; a column of zeros has exponent 0.
    exponents = (exponents - 1).clamp(-120, 120)
    scaled = plain.ldexp_((_COLUMN_EXPONENT - exponents)[:, None]).half()
    scales = torch.zeros((len(weight) + PANEL - 1) // PANEL * PANEL)
    scales[: len(weight)] = torch.ones(len(weight)).ldexp_(exponents - _COLUMN_EXPONENT)
    return scaled, scales
