"""Adapters' thin products (LoRA), added to the rows that have them."""

from __future__ import annotations

from itertools import pairwise
from typing import NamedTuple

from torch import Tensor

from vllm.ops._dispatch import dispatched

RANK_GROUP = 16
"""Ranks that lie side by side in `a`."""


class AddedAdapters(NamedTuple):
    """The arguments of a product by which the same operation adds its rows' adapters: the number of an
    `AdaptedWeights`, and rows as `add_lora_` takes them, where those without an adapter follow the others in `order`.
    """

    number: int
    order: Tensor
    starts: Tensor


def rank_groups(rank: int) -> int:
    """How many groups a matrix of this rank fills."""
    return -(-rank // RANK_GROUP)


def grouped_ranks(a: Tensor, num_groups: int) -> Tensor:
    """[r, K] as `add_lora_` reads it, [num_groups, K, RANK_GROUP], filled up with zeros."""
    wide = a.new_zeros(num_groups * RANK_GROUP, a.shape[1])
    wide[: len(a)] = a
    return wide.unflatten(0, (num_groups, RANK_GROUP)).transpose(1, 2).contiguous()


@dispatched
def add_lora_(
    out: Tensor,
    x: Tensor,
    order: Tensor,
    starts: Tensor,
    a: Tensor,
    b: Tensor,
    ranks: Tensor,
    scales: Tensor,
    borders: Tensor,
    gain: Tensor | None = None,
    shift: Tensor | None = None,
) -> Tensor:
    """Add to `out`, in place, s (x A^T) B^T of each row's adapter (Hu et al. 2021), or make it
    out (1 + gain) + shift + s (x A^T) B^T. Returns `out`.

    The product may be several with the same x, outputs side by side, such as a query's, a key's and a value's: P parts
    with an A, a rank and a scale each. Sums are in float32, in an order that depends neither on other rows nor on
    their adapters; what is between the products is float32 or, of bfloat16 x, may be rounded to it.

    Args:
        out: [T, N], of the dtype of x or float32; the last dimension contiguous.
        x: [T, K], float32, bfloat16 or float16; the last dimension contiguous.
        order: int32 [T]: first the rows of adapter 0, then those of adapter 1 ...; those without one are not in it, and
            the rest is not read.
        starts: int32 [L + 1]: of adapter i the rows are order[starts[i]] to order[starts[i + 1] - 1].
        a: [L, P groups, K, RANK_GROUP] of x's dtype, contiguous: of each part's A [r, K] the `grouped_ranks`.
        b: [L, groups * RANK_GROUP, N] of x's dtype, contiguous: row j has the columns j of all parts' B [N_p, r].
        ranks: int32 [L, P]: what is beyond them in `a` and `b` is not read; 0 = the part is not adapted.
        scales: float32 [L, P].
        borders: int32 [P + 1]: 0, and the column of `out` behind each part's last one.
        gain, shift: float32 [L, N], contiguous.
    """
    groups = a.shape[1] // (len(borders) - 1)
    for adapter in range(len(a)):
        rows = order[starts[adapter] : starts[adapter + 1]].long()
        own = out[rows].float()
        total = own.clone() if gain is None else own * (1 + gain[adapter])
        if shift is not None:
            total += shift[adapter]
        columns = borders.tolist()
        for part, (first, end) in enumerate(pairwise(columns)):
            rank = int(ranks[adapter, part])
            own_a = a[adapter, part * groups : (part + 1) * groups].transpose(1, 2).flatten(0, 1)[:rank]
            inner = x[rows].float() @ own_a.float().T * scales[adapter, part]
            total[:, first:end] += inner @ b[adapter, :rank, first:end].float()
        out[rows] = total.to(out.dtype)
    return out


@dispatched
def add_lora_embedding_(
    out: Tensor,
    ids: Tensor,
    order: Tensor,
    starts: Tensor,
    a: Tensor,
    b: Tensor,
    ranks: Tensor,
    scales: Tensor,
    borders: Tensor,
) -> Tensor:
    """Add to `out` [T, H], in place, s A[:, id]^T B^T of each row's adapter; returns it. As `add_lora_` of one part,
    where x is a row of the unit matrix.

    Args:
        ids: int32 or int64 [T], contiguous; nothing is added where one is not in [0, V).
        a: [L, groups, V, RANK_GROUP]: of each A [r, V] the `grouped_ranks`.
    """
    for adapter in range(len(a)):
        rows = order[starts[adapter] : starts[adapter + 1]].long()
        own = ids[rows].long()
        rows, own = rows[(own >= 0) & (own < a.shape[2])], own[(own >= 0) & (own < a.shape[2])]
        rank = int(ranks[adapter, 0])
        inner = a[adapter].transpose(1, 2).flatten(0, 1)[:rank, own].T.float() * scales[adapter, 0]
        out[rows] = (out[rows].float() + inner @ b[adapter, :rank].float()).to(out.dtype)
    return out
