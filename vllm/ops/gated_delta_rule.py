"""The gated delta rule: linear attention whose memory decays, and learns of a value what it does not yet have."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from vllm.ops._dispatch import dispatched
from vllm.ops.state_rows import clear_new, steps


@dispatched
def gated_delta_rule_(
    qkv: Tensor,
    decay: Tensor,
    beta: Tensor,
    rate: Tensor,
    bias: Tensor,
    pool: Tensor,
    state_slots: Tensor,
    query_start_loc: Tensor,
    seq_lens: Tensor,
    key_heads: int,
    beta_scale: float = 1.0,
    bound: float = 0.0,
    eps: float = 1e-6,
) -> Tensor:
    """The recurrence of each head, token after token and in float32 (arXiv:2412.06464, equation 10; by channel:
    arXiv:2510.26692):

        S = g S;  S = S + k ((v - k S) b);  o = (q / sqrt(Dk)) S

    with g = e^(-rate * softplus(decay + bias)), or, where `bound` is not 0, e^(bound * sigmoid(rate * (decay + bias))),
    b = beta_scale * sigmoid(beta), and k and q divided by the roots of their sums of squares + eps. Returns o,
    [T, Hv * Dv], rounded to qkv's dtype. `pool` gets each row's S. A token's result depends only on its sequence, bit
    for bit, wherever it is cut; on CUDA wherever it is cut at multiples of 16 tokens, or VLLM_BATCH_INVARIANT is set.

    Args:
        qkv: float32, bfloat16 or float16 [T, 2 * Hk * Dk + Hv * Dv], the last dimension contiguous: all heads' queries,
            keys and values. A head of queries and keys serves Hv / Hk heads of values.
        decay: of qkv's dtype [T, Hv], or [T, Hv * Dk] where each key's channel has a decay of its own.
        beta: of qkv's dtype [T, Hv].
        rate: float32 [Hv], not negative.
        bias: float32 [Hv], or [Hv * Dk].
        pool: float32 [slots, Hv, Dk, Dv], each slot contiguous. Changed in place.
        state_slots, query_start_loc, seq_lens: as of `short_conv_`.
        key_heads: Hk.
        bound: not positive.
    """
    _, heads, keys, values = pool.shape
    parts = qkv.float().split([key_heads * keys, key_heads * keys, heads * values], dim=-1)
    q, k = (
        _normalised(part.unflatten(1, (key_heads, keys)), eps).repeat_interleave(heads // key_heads, 1)
        for part in parts[:2]
    )
    v = parts[2].unflatten(1, (heads, values))
    steps_of = (decay.float() + bias).unflatten(1, (heads, -1))
    logs = bound * (rate[:, None] * steps_of).sigmoid() if bound else -rate[:, None] * F.softplus(steps_of)
    kept = logs.exp()[..., None]
    written = beta_scale * beta.float().sigmoid()[..., None]
    clear_new(pool, state_slots, query_start_loc, seq_lens)
    out = torch.empty_like(v)
    for tokens, slots in steps(state_slots, query_start_loc):
        key = k[tokens, :, :, None]
        state = pool[slots] * kept[tokens]
        lacking = v[tokens] - (state * key).sum(2)
        state = state + key * (lacking * written[tokens])[:, :, None]
        pool[slots] = state
        out[tokens] = (state * q[tokens, :, :, None]).sum(2) / keys**0.5
    return out.flatten(1).to(qkv.dtype)


def _normalised(x: Tensor, eps: float) -> Tensor:
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + eps)
