"""The selective scan of Mamba 1: each channel has a state of a few values, each with a decay of its own."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from vllm.ops._dispatch import dispatched
from vllm.ops.state_rows import clear_new, steps


@dispatched
def selective_scan_(
    x: Tensor,
    dt: Tensor,
    b: Tensor,
    c: Tensor,
    gate: Tensor | None,
    rate: Tensor,
    bias: Tensor | None,
    skip: Tensor,
    pool: Tensor,
    state_slots: Tensor,
    query_start_loc: Tensor,
    seq_lens: Tensor,
) -> Tensor:
    """The recurrence of each channel, token after token and in float32 (arXiv:2312.00752, algorithm 2):

        S = e^(-rate * d) S + b (d x);  y = (sum of c S + skip * x) * silu(gate)

    with d = softplus(dt + bias). Returns y, [T, C], rounded to x's dtype. `pool` gets each row's S. A token's result
    depends only on its sequence, bit for bit, wherever it is cut.

    Args:
        x: float32, bfloat16 or float16 [T, C], the last dimension contiguous, as that of all that have x's dtype.
        dt: of x's dtype [T, C].
        b, c: of x's dtype [T, G * N], of G groups of channels; a group's channels follow one another.
        gate: of x's dtype [T, C]; None = no factor.
        rate: float32 [N, C], not negative.
        bias: float32 [C]; None = 0.
        skip: float32 [C].
        pool: float32 [slots, N, C], each slot contiguous. Changed in place.
        state_slots, query_start_loc, seq_lens: as of `short_conv_`.
    """
    step = F.softplus(dt.float() if bias is None else dt.float() + bias)
    size, channels = pool.shape[1:]
    # [T, N, C]
    b, c = (
        each.float().unflatten(1, (-1, size)).transpose(1, 2).repeat_interleave(channels * size // each.shape[1], 2)
        for each in (b, c)
    )
    clear_new(pool, state_slots, query_start_loc, seq_lens)
    out = torch.empty(x.shape, dtype=torch.float32, device=x.device)
    for tokens, slots in steps(state_slots, query_start_loc):
        d = step[tokens, None]
        state = pool[slots] * (-rate * d).exp() + b[tokens] * (d * x[tokens, None].float())
        pool[slots] = state
        out[tokens] = (state * c[tokens]).sum(1)
    out += skip * x.float()
    return (out if gate is None else out * F.silu(gate.float())).to(x.dtype)
