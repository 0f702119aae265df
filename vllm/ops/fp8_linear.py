"""Products of inputs and weights that are both 8-bit floats (E4M3), by the GPU's units for them.

torch._scaled_mm sums in float32. A scale for each row of either is applied by the product itself where torch's build
can, and only in bfloat16; else the plain sums are multiplied with the scales afterwards.
"""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

from vllm import envs
from vllm.ops.quantized_linear import PackedQuantized, PlainPart

# The units ask this of a product's width and number of outputs.
_MULTIPLE = 16
_LEAST_CAPABILITY = (8, 9)


def takes_fp8(packed: PackedQuantized) -> bool:
    """Whether the device multiplies the weight with inputs in 8-bit floats: not with VLLM_BATCH_INVARIANT=1, since how
    the library adds depends on the number of rows."""
    part = packed.parts[0]
    if len(packed.parts) > 1 or not isinstance(part, PlainPart) or envs.batch_invariant():
        return False
    weight = part.rest
    has_only_scales = all(
        each is None or (isinstance(each, int) and not each)
        for each in (weight.offsets, weight.super_scales, weight.input_order, weight.sparse, weight.zero_points)
    )
    fits = weight.num_groups == 1 and not any(size % _MULTIPLE for size in packed.shape)
    is_float8 = part.planes[0].dtype == torch.float8_e4m3fn
    return is_float8 and fits and has_only_scales and _multiplies_fp8(part.planes[0].device)


def fp8_linear(
    codes: Tensor, scales: Tensor, packed: PackedQuantized, dtype: torch.dtype, float_out: bool = False
) -> Tensor:
    """(codes * scales) W^T + bias, [T, N], in `dtype` or, with `float_out`, float32.

    Args:
        codes: float8_e4m3fn [T, K].
        scales: float32 [T, 1].
        packed: a weight that takes_fp8.
    """
    part = packed.parts[0]
    assert isinstance(part, PlainPart)
    weight, weight_scales = part.planes[0].t(), part.rest.scales.float().t()
    if not len(codes):
        return codes.new_empty(0, packed.shape[0], dtype=torch.float32 if float_out else dtype)
    if dtype == torch.bfloat16 and not float_out and _scales_rows(codes.device):
        return _scaled_mm(codes, weight, scales.contiguous(), weight_scales.contiguous(), torch.bfloat16, packed.bias)
    one = scales.new_ones(())
    sums = _scaled_mm(codes, weight, one, one, torch.float32).mul_(scales).mul_(weight_scales)
    if packed.bias is not None:
        sums += packed.bias.float()
    return sums if float_out else sums.to(dtype)


@lru_cache(maxsize=8)
def _multiplies_fp8(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= _LEAST_CAPABILITY


@lru_cache(maxsize=8)
def _scales_rows(device: torch.device) -> bool:
    """Whether the product takes a scale for each row of either factor."""
    codes = torch.ones(_MULTIPLE, _MULTIPLE, device=device).to(torch.float8_e4m3fn)
    scales = torch.ones(_MULTIPLE, 1, device=device)
    try:
        _scaled_mm(codes, codes.t(), scales, scales.t(), torch.bfloat16)
    except (RuntimeError, ValueError):
        return False
    return True


def _scaled_mm(
    x: Tensor, weight: Tensor, x_scales: Tensor, weight_scales: Tensor, dtype: torch.dtype, bias: Tensor | None = None
) -> Tensor:
    return torch._scaled_mm(x, weight, x_scales, weight_scales, bias, out_dtype=dtype)
