"""Products of 16-bit matrices as float32 sums. Logits are not rounded to bfloat16: many of them would become ties."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

# So much of a weight is in float32 at one time where it has to be widened.
_TILE_BYTES = 16 * 2**20


def float_linear(x: Tensor, weight: Tensor) -> Tensor:
    """float32 x W^T, [T, N], of x [T, K] and weight [N, K], both float32, bfloat16 or float16.

    What is launched depends on shapes alone, so a CUDA graph may capture it. It takes little memory beside the result
    and x in float32.
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
