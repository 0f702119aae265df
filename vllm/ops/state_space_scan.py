"""The state space of Mamba 2: linear attention whose memory decays."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from vllm.ops._dispatch import dispatched
from vllm.ops.state_rows import clear_new, steps


@dispatched
def state_space_scan_(
    xbc: Tensor,
    dt: Tensor,
    rate: Tensor,
    bias: Tensor,
    skip: Tensor | None,
    pool: Tensor,
    state_slots: Tensor,
    query_start_loc: Tensor,
    seq_lens: Tensor,
    groups: int,
    dt_min: float = 0.0,
    dt_max: float = torch.inf,
) -> Tensor:
    """The recurrence of each head, token after token and in float32 (arXiv:2405.21060, section 2):

        S = e^(-rate * d) S + B (d x);  y = C S + skip * x

    with d = softplus(dt + bias), clamped to [dt_min, dt_max]. Returns y, [T, H * P], rounded to xbc's dtype. `pool`
    gets each row's S. A token's result depends only on its sequence, bit for bit, wherever it is cut; on
    CUDA wherever it is cut at multiples of 16 tokens, or VLLM_BATCH_INVARIANT is set.

    Args:
        xbc: float32, bfloat16 or float16 [T, H * P + 2 * G * N], the last dimension contiguous: all heads' x, all
            groups' B and their C. A group serves H / G heads.
        dt: of xbc's dtype [T, H].
        rate: float32 [H], not negative.
        bias: float32 [H].
        skip: float32 [H]; None = 0.
        pool: float32 [slots, H, N, P], each slot contiguous. Changed in place.
        state_slots, query_start_loc, seq_lens: as of `short_conv_`.
        groups: G.
    """
    _, heads, size, width = pool.shape
    parts = xbc.float().split([heads * width, groups * size, groups * size], dim=-1)
    x = parts[0].unflatten(1, (heads, width))
    b, c = (part.unflatten(1, (groups, size)).repeat_interleave(heads // groups, 1) for part in parts[1:])
    step = F.softplus(dt.float() + bias).clamp(dt_min, dt_max)
    kept = (-rate * step).exp()
    clear_new(pool, state_slots, query_start_loc, seq_lens)
    out = torch.empty_like(x)
    for tokens, slots in steps(state_slots, query_start_loc):
        written = b[tokens, :, :, None] * (x[tokens] * step[tokens, :, None])[:, :, None]
        state = pool[slots] * kept[tokens, :, None, None] + written
        pool[slots] = state
        out[tokens] = (state * c[tokens, :, :, None]).sum(2)
    if skip is not None:
        out += skip[:, None] * x
    return out.flatten(1).to(xbc.dtype)
