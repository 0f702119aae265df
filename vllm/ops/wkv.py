"""RWKV 4's attention: each channel reads a mean of the values so far, whose weights decay."""

from __future__ import annotations

import torch
from torch import Tensor

from vllm.ops._dispatch import dispatched
from vllm.ops.state_rows import clear_new, steps

# The exponent of a sum of nothing.
_NOTHING = -1e38


@dispatched
def wkv_(
    key: Tensor,
    value: Tensor,
    gate: Tensor,
    rate: Tensor,
    bonus: Tensor,
    pool: Tensor,
    state_slots: Tensor,
    query_start_loc: Tensor,
    seq_lens: Tensor,
) -> Tensor:
    """The recurrence of each channel, token after token and in float32 (arXiv:2305.13048, equation 16):

        y = sigmoid(gate) (A + e^(bonus + key) value) / (B + e^(bonus + key)),
        A = e^-rate A + e^key value;  B = e^-rate B + e^key

    Returns y, [T, C], rounded to key's dtype. `pool` gets each row's A / e^p, B / e^p, and p, the greatest exponent so
    far. A token's result depends only on its sequence, bit for bit, wherever it is cut.

    Args:
        key, value, gate: float32, bfloat16 or float16 [T, C], the last dimension contiguous.
        rate: float32 [C], positive.
        bonus: float32 [C].
        pool: float32 [slots, 3, C], each slot contiguous. Changed in place.
        state_slots, query_start_loc, seq_lens: as of `short_conv_`.
    """
    clear_new(pool, state_slots, query_start_loc, seq_lens)
    pool[state_slots[seq_lens == query_start_loc.diff()], 2] = _NOTHING
    out = torch.empty(key.shape, dtype=torch.float32, device=key.device)
    for tokens, slots in steps(state_slots, query_start_loc):
        (total, weights, peak), k, v = pool[slots].unbind(1), key[tokens].float(), value[tokens].float()
        greatest = torch.maximum(peak, k + bonus)
        before, now = (peak - greatest).exp(), (k + bonus - greatest).exp()
        out[tokens] = (before * total + now * v) / (before * weights + now)
        after = torch.maximum(peak - rate, k)
        # The difference is exact where peaks are near, and so has what rounding the next one lost.
        kept, added = ((peak - after) - rate).exp(), (k - after).exp()
        pool[slots] = torch.stack((kept * total + added * v, kept * weights + added, after), dim=1)
    return (out * gate.float().sigmoid()).to(key.dtype)
