"""The matrix memory of xLSTM: linear attention with exponential gates."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from vllm.ops._dispatch import dispatched
from vllm.ops.state_rows import clear_new, steps


@dispatched
def mlstm_(
    qkv: Tensor,
    gates: Tensor,
    pool: Tensor,
    state_slots: Tensor,
    query_start_loc: Tensor,
    seq_lens: Tensor,
    key_dim: int,
    cap: float,
    eps: float,
) -> Tensor:
    """The recurrence of each head, token after token and in float32 (arXiv:2405.04517, equations 19 to 27):

        C = f C + i k v;  n = f n + i k;  y = (q C) / (max(|q n|, 1) + e^m eps)

    with i = e^a, f = sigmoid(b), where a and b are the gates' values through cap * tanh(x / cap), and q divided by
    sqrt(K). `pool` gets each row's C, n and m, the logarithm of what both of these are divided by, which a sequence
    begins with as 0. Returns y, [T, H * V], rounded to qkv's dtype. A token's result depends only on its sequence, bit
    for bit, wherever it is cut.

    Args:
        qkv: float32, bfloat16 or float16 [T, H * (2 * K + V)], the last dimension contiguous: all heads' queries, their
            keys and their values.
        gates: of qkv's dtype [T, 2 * H]: all heads' input gates, and their forget gates.
        pool: float32 [slots, H, K * V + K + 1], each slot contiguous: of each head C [K, V], n [K] and m. Changed in
            place.
        state_slots, query_start_loc, seq_lens: as of `short_conv_`.
        key_dim: K.
        cap: positive.
    """
    heads, size = pool.shape[1:]
    width = (size - key_dim - 1) // key_dim
    parts = qkv.float().split([heads * key_dim, heads * key_dim, heads * width], dim=1)
    q, k, v = (part.unflatten(1, (heads, -1)) for part in parts)
    q = q * key_dim**-0.5
    inputs, forgets = (cap * torch.tanh(gates.float() / cap)).chunk(2, dim=1)
    kept = F.logsigmoid(forgets)
    clear_new(pool, state_slots, query_start_loc, seq_lens)
    out = torch.empty(v.shape, dtype=torch.float32, device=qkv.device)
    for tokens, slots in steps(state_slots, query_start_loc):
        matrix, norm, before = pool[slots].split([key_dim * width, key_dim, 1], dim=2)
        peak = torch.maximum(before + kept[tokens, :, None], inputs[tokens, :, None])
        # The difference is exact where peaks are near, and so has what rounding this one lost.
        decay = ((before - peak) + kept[tokens, :, None]).exp()
        scale = (inputs[tokens, :, None] - peak).exp()
        written = (k[tokens, :, :, None] * (v[tokens] * scale)[:, :, None]).flatten(2)
        matrix, norm = matrix * decay + written, norm * decay + k[tokens] * scale
        pool[slots] = torch.cat((matrix, norm, peak), dim=2)
        divisor = torch.maximum((q[tokens] * norm).sum(-1, keepdim=True).abs(), (-peak).exp()) + eps
        out[tokens] = (matrix.unflatten(2, (key_dim, width)) * q[tokens, :, :, None]).sum(2) / divisor
    return out.flatten(1).to(qkv.dtype)
