"""A causal convolution by channel over few tokens, whose last inputs are kept for the tokens to come."""

from __future__ import annotations

import torch
from torch import Tensor


def short_conv_(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    tail: Tensor,
    state_slots: Tensor,
    query_start_loc: Tensor,
    seq_lens: Tensor,
    silu: bool = False,
) -> Tensor:
    """[T, C]: of each token and channel, sum over k of weight[k] * (the input K - 1 - k tokens before) + bias, in
    float32 in the order of k; its SiLU with `silu`. What a sequence has before its first token is 0.

    The tokens of R requests stand one after another; of request r they are x[query_start_loc[r] : query_start_loc[r +
    1]], the last of its seq_lens[r] ones. Its K - 1 inputs before these are row state_slots[r] of `tail`, the oldest
    first, unless it has none before: then the row may hold anything. Afterwards the row has the last K - 1 inputs.

    `x` is float32, bfloat16 or float16, its last dimension contiguous; `weight` [K, C], `bias` [C] and `tail` [slots,
    K - 1, C] have its dtype. `state_slots` are int64 [R], distinct, `query_start_loc` int32 [R + 1] and `seq_lens`
    int32 [R].
    """
    sums = _convolve(x, weight, bias, tail, state_slots, query_start_loc, seq_lens)
    return (torch.nn.functional.silu(sums) if silu else sums).to(x.dtype)


def gated_short_conv_(
    bcx: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    tail: Tensor,
    state_slots: Tensor,
    query_start_loc: Tensor,
    seq_lens: Tensor,
) -> Tensor:
    """[T, C]: c * conv(b * x), where b, c and x are the thirds of `bcx`, [T, 3 * C]. The convolution's inputs are
    rounded to the dtype of `bcx`, its sums are not; the other arguments are those of `short_conv_`."""
    b, c, x = bcx.chunk(3, dim=1)
    return (c * _convolve(b * x, weight, bias, tail, state_slots, query_start_loc, seq_lens)).to(bcx.dtype)


def _convolve(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    tail: Tensor,
    state_slots: Tensor,
    query_start_loc: Tensor,
    seq_lens: Tensor,
) -> Tensor:
    """The sums in float32; renews the tails."""
    num_before = tail.shape[1]
    counts = (query_start_loc[1:] - query_start_loc[:-1]).long()
    is_new = seq_lens == counts
    # [R, K - 1, C]: what comes before each request's tokens.
    before = tail.index_select(0, state_slots).masked_fill_(is_new[:, None, None], 0)
    starts = query_start_loc[:-1].long()
    tokens = torch.arange(len(x), device=x.device)
    rows = torch.searchsorted(query_start_loc[1:].long(), tokens, right=True)
    sums = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
    for k in range(num_before + 1):
        sums += weight[k].float() * _inputs_at(tokens - starts[rows] + k - num_before, rows, x, before, starts)
    if bias is not None:
        sums += bias.float()
    places = counts[:, None] + torch.arange(-num_before, 0, device=x.device)
    of_rows = torch.arange(len(counts), device=x.device)[:, None].expand_as(places)
    tail.index_copy_(0, state_slots, _inputs_at(places, of_rows, x, before, starts).to(tail.dtype))
    return sums


def _inputs_at(places: Tensor, rows: Tensor, x: Tensor, before: Tensor, starts: Tensor) -> Tensor:
    """[..., C]: inputs by place among their request's tokens of this step, below 0 before it."""
    own = x[(starts[rows] + places).clamp(0, len(x) - 1)]
    if not before.shape[1]:
        return own
    earlier = before[rows, (places + before.shape[1]).clamp(0, before.shape[1] - 1)]
    return torch.where((places >= 0)[..., None], own, earlier)
