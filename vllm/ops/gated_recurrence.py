"""The real-gated linear recurrent unit of Griffin: each channel keeps one number."""

from __future__ import annotations

import torch
from torch import Tensor

from vllm.ops._dispatch import dispatched
from vllm.ops.state_rows import clear_new, steps


@dispatched
def gated_recurrence_(
    x: Tensor,
    input_gate: Tensor,
    kept_gate: Tensor,
    input_bias: Tensor,
    kept_bias: Tensor,
    rate: Tensor,
    pool: Tensor,
    state_slots: Tensor,
    query_start_loc: Tensor,
    seq_lens: Tensor,
) -> Tensor:
    """The recurrence of each channel, token after token and in float32 (arXiv:2402.19427, section 2.4):

        h = a h + sqrt(1 - a^2) sigmoid(input_gate + input_bias) x,  a = e^(-rate * sigmoid(kept_gate + kept_bias))

    of which a sequence's first token has 1 in place of the root. Returns h, [T, C], rounded to x's dtype. `pool` gets
    each row's h. A token's result depends only on its sequence, bit for bit, wherever it is cut.

    Args:
        x, input_gate, kept_gate: float32, bfloat16 or float16 [T, C], the last dimension contiguous.
        input_bias, kept_bias: float32 [C].
        rate: float32 [C], not negative.
        pool: float32 [slots, C], each slot contiguous. Changed in place.
        state_slots, query_start_loc, seq_lens: as of `short_conv_`.
    """
    logs = -rate * (kept_gate.float() + kept_bias).sigmoid()
    share = (-torch.expm1(2 * logs)).sqrt()
    share[query_start_loc[:-1][seq_lens == query_start_loc.diff()].long()] = 1.0
    inputs = share * x.float() * (input_gate.float() + input_bias).sigmoid()
    clear_new(pool, state_slots, query_start_loc, seq_lens)
    out = torch.empty(x.shape, dtype=torch.float32, device=x.device)
    for tokens, slots in steps(state_slots, query_start_loc):
        pool[slots] = pool[slots] * logs[tokens].exp() + inputs[tokens]
        out[tokens] = pool[slots]
    return out.to(x.dtype)
