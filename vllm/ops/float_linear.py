"""Products of 16-bit matrices as the float32 sums that they are: what rounding them would do to logits, where many lie
within one step of bfloat16, is make ties and ranks that are not the model's."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

# Of the weight in float32, at one time, where it has to be widened.
_TILE_BYTES = 16 * 2**20


def float_linear(x: Tensor, weight: Tensor) -> Tensor:
    """float32 x W^T, [T, N].

    What happens depends on shapes alone, so that a CUDA graph may record it, and takes little memory beside the result
    and x in float32.

    Args:
        x: [T, K], float32, bfloat16 or float16.
        weight: [N, K] of the same dtype.
    """
    if x.dtype == torch.float32:
        return F.linear(x, weight)
    if _gives_float32(x.device):
        return torch.mm(x, weight.t(), out_dtype=torch.float32)
    out = torch.empty(len(x), len(weight), dtype=torch.float32, device=x.device)
    wide = x.float()
    tile = max(1, _TILE_BYTES // (4 * weight.shape[1]))
    for first in range(0, len(weight), tile):
        columns = slice(first, first + tile)
        torch.mm(wide, weight[columns].float().t(), out=out[:, columns])
    return out


def _gives_float32(device: torch.device) -> bool:
    """Whether PyTorch multiplies 16-bit matrices to float32 there: on CUDA, from 2.8 on."""
    return device.type == "cuda" and hasattr(torch.ops.aten.mm, "dtype")
