"""Matrix products with 8-bit weights, a scale for each output, and 16-bit activations, a scale for each row.

With s = max |row| / 127 a row of the weight is round(row / s); with t = max |row of x| / 32639 a row of x is
round(row / t). The result is the exact sum of their products times t and s, plus the bias. Activations keep 16 bits, as
two 8-bit digits: with 8 bits alone the few huge ones of language models would take the resolution from all others
(docs/quantization.md has the figures). Sums of integers have one value whatever their order, so a row's result does
not depend on the batch.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from vllm.ops._dispatch import implementation
from vllm.ops.packed_linear import PANEL, interleave_gate

# Sums of products of 8-bit digits and weights stay below 2**31.
MAX_INNER = 65536

_GREATEST_WEIGHT = 127
# 127 * 256 + 127: the greatest number of two 8-bit digits in [-128, 127].
_GREATEST_ACTIVATION = 32639
# Rows of no greater absolute value count as zero: the inverse of their scale would overflow.
_LEAST_ACTIVATION = 1e-30
# What the kernel's layout fills K up to.
_RUN = 16


@dataclass
class Int8Linear:
    """A weight of 8-bit integers, ready to multiply with.

    Attributes:
        weight: int8 [N, K] when the layout is "plain"; "panels" of the C++ kernel are uint8
            [ceil(N / 32), ceil(K / 16) * 4, 32, 4], each value plus 128.
        scales: float32 [N], padded with zeros to whole panels.
        bias: [N] in the dtype of the activations, or None.
        layout: "plain" or "panels".
        shape: (N, K).
        gated: the product is silu(x G^T + b) * (x U^T + c), where G and U are the weight's two halves of rows.
    """

    weight: Tensor
    scales: Tensor
    bias: Tensor | None
    layout: Literal["plain", "panels"]
    shape: tuple[int, int]
    gated: bool = False


def pack_int8_linear(weight: Tensor, bias: Tensor | None, float_out: bool = False, gated: bool = False) -> Int8Linear:
    """Quantise a weight [N, K] (float32, bfloat16 or float16) to 8 bits, and take its bias [N] over.

    Args:
        float_out: makes no difference here; see pack_linear.
        gated: multiply to silu(x G^T + b) * (x U^T + c) at once, if the layout can: the result's `gated` tells.

    Raises:
        ValueError: K exceeds MAX_INNER, or a value is not finite.
    """
    if weight.shape[1] > MAX_INNER:
        raise ValueError(f"quantization='int8' takes layers of at most {MAX_INNER} inputs, got {weight.shape[1]}")
    if gated and implementation(weight) == "cpp":
        packed = pack_int8_linear(interleave_gate(weight), None if bias is None else interleave_gate(bias))
        return replace(packed, shape=(weight.shape[0], weight.shape[1]), gated=True)
    values = weight.float()
    greatest = values.abs().amax(1)
    if not greatest.isfinite().all():
        raise ValueError("quantization='int8' needs finite weights, got NaN or infinity")
    scales = greatest / _GREATEST_WEIGHT
    # A row of zeros, or so nearly that the scale has no inverse, becomes zeros.
    divisors = torch.where(scales > torch.finfo(torch.float32).tiny, scales, torch.inf)
    return _arrange((values / divisors[:, None]).round_().to(torch.int8), scales, bias)


def take_int8_rows(packed: Int8Linear, rows: Tensor) -> Int8Linear:
    """The weight's rows and their biases, packed as `packed` is: a product gives the very bits of the whole's columns.

    Args:
        packed: not gated.
        rows: int64 [I] in [0, N), on the weight's device, in any order and not necessarily distinct.
    """
    bias = None if packed.bias is None else packed.bias[rows]
    if packed.layout == "plain":
        taken = packed.weight[rows]
    else:
        chosen = packed.weight[rows // PANEL, :, rows % PANEL].flatten(1)[:, : packed.shape[1]]
        taken = (chosen.to(torch.int16) - 128).to(torch.int8)
    return _arrange(taken, packed.scales[rows], bias)


def int8_linear(x: Tensor, packed: Int8Linear, float_out: bool = False) -> Tensor:
    """x W^T + bias, as the module's description says.

    Args:
        x: [T, K], float32, bfloat16 or float16; any strides. A row with NaN or infinity gives NaN alone.
        float_out: give the result in float32, before it is rounded to x's dtype.

    Returns:
        [T, N], or [T, N / 2] when `packed.gated`; contiguous, in x's dtype or float32.

    Raises:
        ValueError: the width of x is not K.
    """
    if x.shape[-1] != packed.shape[1]:
        raise ValueError(f"x must be [T, {packed.shape[1]}] for a weight of {packed.shape}, got {tuple(x.shape)}")
    if packed.layout == "panels":
        columns = packed.shape[0] // 2 if packed.gated else packed.shape[0]
        return torch.ops.vllm_cpu.linear_int8(
            x, packed.weight, packed.scales, packed.bias, columns, float_out, packed.gated
        )
    return _reference(x, packed, float_out)


def _arrange(weight: Tensor, scales: Tensor, bias: Tensor | None) -> Int8Linear:
    """int8 [N, K] in the layout that the device multiplies."""
    n, k = weight.shape
    if implementation(weight) != "cpp":
        return Int8Linear(weight, scales, bias, "plain", (n, k))
    rows, width = -n % PANEL, -k % _RUN
    padded = torch.nn.functional.pad(weight, (0, width, 0, rows))
    panels = padded.view(-1, PANEL, (k + width) // 4, 4).permute(0, 2, 1, 3).contiguous()
    # In two's complement, adding 128 is flipping the sign bit.
    shifted = panels.view(torch.uint8).bitwise_xor_(128)
    return Int8Linear(shifted, torch.nn.functional.pad(scales, (0, rows)), bias, "panels", (n, k))


def _reference(x: Tensor, packed: Int8Linear, float_out: bool) -> Tensor:
    values = x.float()
    greatest = values.abs().amax(1, keepdim=True)
    counts, limit = greatest > _LEAST_ACTIVATION, torch.full_like(greatest, _GREATEST_ACTIVATION)
    # Tensors divide exactly, as the kernel does; a number over a tensor is multiplied by a rounded inverse.
    scales = torch.where(counts, greatest / limit, 0.0) + (values * 0.0).sum(1, keepdim=True)
    whole = (values * torch.where(counts, limit / greatest, 0.0)).round()
    # float64 holds every sum of these products exactly.
    sums = (whole.double() @ packed.weight.double().T).float()
    out = sums * scales * packed.scales
    if packed.bias is not None:
        out = out + packed.bias.float()
    return out if float_out else out.to(x.dtype)
