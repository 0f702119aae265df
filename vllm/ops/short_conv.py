"""Convolution of each channel over its last inputs, of which a sequence's last ones are kept."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from vllm.ops._dispatch import dispatched
from vllm.ops.state_rows import clear_new, steps


@dispatched
def short_conv_(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    tail: Tensor,
    state_slots: Tensor,
    query_start_loc: Tensor,
    seq_lens: Tensor,
    silu: bool = False,
    before: Tensor | None = None,
    after: Tensor | None = None,
) -> Tensor:
    """act(bias + sum over k of weight[k] * the input K - 1 - k tokens ago), in float32 and rounded once: [T, C],
    contiguous. `tail` gets the last inputs of each row. A token's result depends only on its sequence's inputs.

    Args:
        x: float32, bfloat16 or float16 [T, C], the last dimension contiguous.
        weight: of x's dtype [K, C], contiguous; K is 2 to 8, and the last row belongs to the token itself.
        bias: of x's dtype [C], or None.
        tail: of x's dtype [slots, K - 1, C], each slot contiguous: the inputs before these, the oldest first. Changed
            in place.
        state_slots: int64 [R], which of them a row has; all different.
        query_start_loc: int32 [R + 1]: row r has the tokens from its r-th number up to the next one.
        seq_lens: int32 [R], tokens of a row's sequence up to its last one here. Where these are all, it begins, and
            there is nothing before it.
        silu: act, else the identity.
        before, after: as x, or None: factors on the inputs (rounded to x's dtype then) and on the results.
    """
    clear_new(tail, state_slots, query_start_loc, seq_lens)
    if before is not None:
        x = x * before
    out = torch.empty(x.shape, dtype=torch.float32, device=x.device)
    for tokens, slots in steps(state_slots, query_start_loc):
        inputs = torch.cat([tail[slots], x[tokens, None]], dim=1)
        tail[slots] = inputs[:, 1:]
        out[tokens] = (inputs.float() * weight.float()).sum(1)
    if bias is not None:
        out += bias.float()
    if silu:
        out = F.silu(out)
    return (out if after is None else out * after.float()).to(x.dtype)


def gated_short_conv_(
    bcx: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    tail: Tensor,
    state_slots: Tensor,
    query_start_loc: Tensor,
    seq_lens: Tensor,
) -> Tensor:
    """C * short_conv_(B * x), of `bcx` [T, 3C], which has B, C and x side by side."""
    b, c, x = bcx.chunk(3, dim=-1)
    return short_conv_(x, weight, bias, tail, state_slots, query_start_loc, seq_lens, False, b, c)
