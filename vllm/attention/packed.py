"""Attention of tokens to all others of their sequence, before and after them, without a cache."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from vllm.attention.backend import PLAIN, AttentionBackend, KVCache
from vllm.attention.options import AttentionOptions
from vllm.ops.kv_cache import kv_cache_shape, reshape_and_cache_
from vllm.ops.paged_attention import has_bidirectional_kernel, paged_attention
from vllm.ops.rotary import rotary_embedding_

_BLOCK = 16
# Of a block with a mask.
_QUERIES = 256


@dataclass
class PackedSequences:
    """A step of whole sequences, one after another, in place of AttentionMetadata.

    Attributes:
        attended: how many of each sequence's first tokens are seen by all of them; None: all are.
        kv: of the layer that runs.
    """

    lengths: Sequence[int]
    attended: Sequence[int] | None = None
    kv: KVCache | None = None
    _pages: _Pages | None = None

    def pages(self, k: Tensor) -> _Pages:
        """A cache for keys and values like k, [T, Hkv, D]; of all layers, since none reads another's."""
        if self._pages is None or self._pages.keys.shape[1:] != (k.shape[1], _BLOCK * k.shape[2]):
            self._pages = _make_pages(self.lengths, self.attended or self.lengths, k)
        return self._pages


class _Pages(NamedTuple):
    """The sequences' blocks, one after another."""

    keys: Tensor
    values: Tensor
    slots: Tensor  # int64 [T]
    block_table: Tensor  # int32 [R, blocks of the longest]
    query_start_loc: Tensor  # int32 [R + 1]
    attended: Tensor  # int32 [R]


def _make_pages(lengths: Sequence[int], attended: Sequence[int], k: Tensor) -> _Pages:
    sizes = torch.tensor(lengths, dtype=torch.int32)
    counts = (sizes + _BLOCK - 1) // _BLOCK
    ends, firsts = sizes.cumsum(0, dtype=torch.int32), counts.cumsum(0, dtype=torch.int32) - counts
    places = torch.arange(int(ends[-1])) - (ends - sizes).repeat_interleave(sizes)
    slots = firsts.repeat_interleave(sizes) * _BLOCK + places
    table = firsts[:, None] + torch.arange(int(counts.max()), dtype=torch.int32)
    shape = kv_cache_shape(int(counts.sum()), _BLOCK, k.shape[1], k.shape[2])
    starts = torch.nn.functional.pad(ends, (1, 0))
    seen = torch.tensor(attended, dtype=torch.int32)
    return _Pages(k.new_empty(shape), k.new_empty(shape), slots, table, starts, seen)


class PackedAttention(AttentionBackend):
    """For layers that are called with PackedSequences; a window of w reaches w - 1 tokens to either side.

    Raises:
        ValueError: from `attend`, a layer with other options than window, soft-cap and scale.
    """

    name = "packed"
    can_be_captured = False
    options = frozenset({"window", "softcap"})

    def kv_cache_shape(self, num_blocks: int, block_size: int, num_kv_heads: int, head_dim: int) -> tuple[int, ...]:
        return (0,)

    def attend(
        self, q: Tensor, kv_cache: Any, attn: Any, options: AttentionOptions, out: Tensor | None = None
    ) -> Tensor:
        if other := options.given() - self.options:
            raise ValueError(f"bidirectional attention with {', '.join(sorted(other))} is not supported")
        return self._attend(q, attn.kv, attn, options, out)

    def _attend(self, q: Tensor, kv_cache: KVCache, attn: Any, options: AttentionOptions, out: Tensor | None) -> Tensor:
        got = attend_packed(q, *kv_cache, attn, options)
        return got if out is None else out.copy_(got)

    def write_kv(self, k: Tensor, v: Tensor, kv_cache: Any, attn: Any, options: AttentionOptions = PLAIN) -> None:
        attn.kv = (k, v)

    def rotate_and_write_kv(
        self,
        positions: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        cos_sin_cache: Tensor,
        kv_cache: Any,
        attn: Any,
        options: AttentionOptions = PLAIN,
    ) -> None:
        rotary_embedding_(positions, q, k, cos_sin_cache)
        attn.kv = (k, v)


def attend_packed(q: Tensor, k: Tensor, v: Tensor, sequences: PackedSequences, options: AttentionOptions) -> Tensor:
    """Attention within each of the sequences: [T, Hq, D]. A window of w reaches w - 1 tokens to either side, and ALiBi
    adds slope * -|key's position - query's|.

    Args:
        q, k, v: [T, Hq, D], [T, Hkv, D] and [T, Hkv, D].
    """
    lengths = sequences.lengths
    is_whole = options.window is None or options.window >= max(lengths)
    if is_whole and options.alibi_slopes is None and has_bidirectional_kernel(q):
        pages = sequences.pages(k)
        reshape_and_cache_(k, v, pages.keys, pages.values, pages.slots)
        scale = q.shape[-1] ** -0.5 if options.scale is None else options.scale
        blocks = pages.block_table, pages.query_start_loc, pages.attended
        return paged_attention(q, pages.keys, pages.values, *blocks, scale, softcap=options.softcap, bidirectional=True)
    out = torch.empty_like(q)
    start = 0
    for (length, seen), same in groupby(zip(lengths, sequences.attended or lengths, strict=True)):
        count = len(list(same))
        rows = slice(start, start + count * length)
        queries, keys, values = (each[rows].unflatten(0, (count, length)).transpose(1, 2) for each in (q, k, v))
        out[rows] = _attend(queries, keys[:, :, :seen], values[:, :, :seen], options).transpose(1, 2).flatten(0, 1)
        start = rows.stop
    return out


def _attend(q: Tensor, k: Tensor, v: Tensor, options: AttentionOptions) -> Tensor:
    """[N, Hq, L, D] and of the keys that are seen [N, Hkv, S, D]. Blocks of queries bound the memory of masks and skip
    keys out of reach; a query without one in its reach has zeros."""
    length = q.shape[2]
    reach = length if options.window is None else options.window - 1
    if reach >= length - 1 and options.alibi_slopes is None:
        return _attend_block(q, k, v, None, options)
    places = torch.arange(length, device=q.device)
    parts = []
    for start in range(0, length, _QUERIES):
        stop = min(start + _QUERIES, length)
        keys = slice(max(start - reach, 0), min(stop + reach, k.shape[2]))
        if keys.start >= keys.stop:
            parts.append(torch.zeros_like(q[:, :, start:stop]))
            continue
        distances = (places[start:stop, None] - places[keys]).abs()
        parts.append(_attend_block(q[:, :, start:stop], k[:, :, keys], v[:, :, keys], distances, options))
    return torch.cat(parts, 2)


def _attend_block(q: Tensor, k: Tensor, v: Tensor, distances: Tensor | None, options: AttentionOptions) -> Tensor:
    """`distances`: between queries and keys, [Lq, Lk]; None: they do not matter."""
    mask = None if distances is None or options.window is None else distances < options.window
    if options.softcap is None and options.alibi_slopes is None:
        is_grouped = q.shape[1] != k.shape[1]
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=options.scale, enable_gqa=is_grouped)
    groups = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
    scores = (q.float() @ k.float().transpose(2, 3)) * (q.shape[-1] ** -0.5 if options.scale is None else options.scale)
    if options.softcap is not None:
        scores = torch.tanh(scores / options.softcap) * options.softcap
    if options.alibi_slopes is not None and distances is not None:
        scores -= options.alibi_slopes[:, None, None] * distances
    if mask is not None:
        scores = scores.masked_fill(~mask, -torch.inf)
    return scores.softmax(-1).to(v.dtype) @ v
