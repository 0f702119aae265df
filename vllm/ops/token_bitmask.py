"""Keeping the logits of allowed tokens."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor


def keep_bits_(logits: Tensor, mask: Tensor, first: int) -> None:
    """Set to -inf, in place, the logits of tokens whose bit is 0.

    Args:
        logits: float32 [R, V]; column 0 is of token `first`.
        mask: int32 [R, W], on the same device, a bit a token, the lowest bit of a word first; 32 * W >= first + V.
    """
    end = first + logits.shape[1]
    if mask.device.type == "cpu":
        bits = np.unpackbits(mask.numpy().view(np.uint8), axis=1, count=end, bitorder="little")
        allowed = torch.from_numpy(bits)
    else:
        places = torch.arange(8, dtype=torch.uint8, device=mask.device)
        allowed = (mask.view(torch.uint8)[:, :, None] >> places & 1).flatten(1)[:, :end]
    logits.masked_fill_(allowed[:, first:] == 0, -torch.inf)
