"""The interface of attention backends (the cache's layout, writing keys and values, attention), and our backend."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import numpy as np
import torch
from torch import Tensor

from vllm.attention.options import AttentionOptions
from vllm.ops.kv_cache import kv_cache_shape, kv_rows_shape, reshape_and_cache_
from vllm.ops.paged_attention import paged_attention, paged_attention_reference
from vllm.ops.rotary import rotary_and_cache_

KVCache = tuple[Tensor, Tensor]
PLAIN = AttentionOptions()


class HostStep(NamedTuple):
    """A step's requests on the host, for a backend that plans there. The arrays are the runner's own: they are valid
    while the step is dispatched."""

    query_start_loc: np.ndarray  # int32 [R + 1]
    seq_lens: np.ndarray  # int32 [R]
    slots: np.ndarray  # int64 [R], the requests' rows of the table
    block_table: np.ndarray  # int32 [S, B], KV block ids; none where no query of a layer with the group's window sees


class WholeBlock(NamedTuple):
    """Tokens of a step that see each other, those after them, too."""

    row: int  # the request's
    first: int  # the step's tokens [first, end)
    end: int
    seq_len: int  # tokens of the request up to the last of them
    begin: int | None  # the request's first token that they all see, whatever their windows are; None: windows hold


@dataclass
class AttentionMetadata:
    """A step of T tokens of R requests, the requests' tokens one after another; every layer reads it.

    Request r's queries are the last (query_start_loc[r + 1] - query_start_loc[r]) of its seq_lens[r] tokens.
    """

    slot_mapping: Tensor  # int64 [T], KV cache slot of each token: block id * block size + offset
    block_table: Tensor  # int32 [R, blocks of the longest request], KV block ids
    query_start_loc: Tensor  # int32 [R + 1], first token of each request
    seq_lens: Tensor  # int32 [R], tokens with KV after this step
    max_query_len: int
    max_seq_len: int
    # The first requests, which have one query each, where no other one has just one, and the longest of their
    # sequences; None: not known.
    num_decodes: int | None = None
    max_decode_len: int | None = None
    # Tokens whose keys and values another request has at the same positions, and its slots for them, both int64 [S].
    shared: tuple[Tensor, Tensor] | None = None
    # The same step for the layers of the other KV groups, from the second on; they differ in blocks and slots alone.
    groups: tuple[AttentionMetadata, ...] = ()
    # None where a step is captured.
    host: HostStep | None = None
    group: int = 0  # the KV group's number
    # int64 [R], of layers with a state the pools' row of each request; None: the model has no such layers.
    state_slots: Tensor | None = None
    whole_blocks: Sequence[WholeBlock] = ()
    whole_in_windows_only: bool = False  # whether these are such for layers with a window alone


class AttentionBackend(ABC):
    """One for an engine, called by every layer. `name` is its value of `attention_backend`.

    A step with it can be captured in a CUDA graph if `can_be_captured`: the launches of `attend` depend on shapes,
    num_decodes and the greatest lengths alone, and it does nothing on the host that a replay would miss.
    """

    name: ClassVar[str]
    can_be_captured: ClassVar[bool] = True
    # The options of `AttentionOptions` that its own kernels have; layers with others run on our kernels.
    options: ClassVar[frozenset[str]] = frozenset()

    @abstractmethod
    def kv_cache_shape(self, num_blocks: int, block_size: int, num_kv_heads: int, head_dim: int) -> tuple[int, ...]:
        """Shape of a layer's key cache, and of its value cache; blocks come first."""

    def attend(
        self,
        q: Tensor,
        kv_cache: KVCache,
        attn: AttentionMetadata,
        options: AttentionOptions,
        out: Tensor | None = None,
    ) -> Tensor:
        """Causal attention of q [T, Hq, D] over keys and values already in the cache; returns [T, Hq, D], `out`, if it
        is given. `options.scale` is a number."""
        if options.given() <= self.options:
            out = self._attend(q, kv_cache, attn, options, out)
        else:
            out = _attend_paged(q, self._of_operations(kv_cache), attn, options, out)
        if attn.whole_blocks and (options.window is not None or not attn.whole_in_windows_only):
            _attend_whole(q, self._of_operations(kv_cache), attn, options, out)
        return out

    @abstractmethod
    def _attend(
        self, q: Tensor, kv_cache: KVCache, attn: AttentionMetadata, options: AttentionOptions, out: Tensor | None
    ) -> Tensor:
        """As `attend`, with the options that the backend has."""

    def write_kv(
        self, k: Tensor, v: Tensor, kv_cache: KVCache, attn: AttentionMetadata, options: AttentionOptions = PLAIN
    ) -> None:
        """Write k, v [T, Hkv, D] into the cache's slots; `options` has their scales."""
        k_cache, v_cache = self._of_operations(kv_cache)
        reshape_and_cache_(k, v, k_cache, v_cache, attn.slot_mapping, options.k_scale, options.v_scale)
        _write_shared(k, v, k_cache, v_cache, attn, options)

    def rotate_and_write_kv(
        self,
        positions: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        cos_sin_cache: Tensor,
        kv_cache: KVCache,
        attn: AttentionMetadata,
        options: AttentionOptions = PLAIN,
    ) -> None:
        """Rotate q [T, Hq, D] and k [T, Hkv, D] in place by positions [T], then write k, v into the cache's slots."""
        k_cache, v_cache = self._of_operations(kv_cache)
        scales = options.k_scale, options.v_scale
        rotary_and_cache_(positions, q, k, v, cos_sin_cache, k_cache, v_cache, attn.slot_mapping, *scales)
        _write_shared(k, v, k_cache, v_cache, attn, options)

    def _of_operations(self, kv_cache: KVCache) -> KVCache:
        """The caches in a layout of `vllm.ops.kv_cache`."""
        return kv_cache


def _write_shared(
    k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, attn: AttentionMetadata, options: AttentionOptions
) -> None:
    if attn.shared is not None:
        tokens, slots = attn.shared
        scales = options.k_scale, options.v_scale
        reshape_and_cache_(k.index_select(0, tokens), v.index_select(0, tokens), k_cache, v_cache, slots, *scales)


def _attend_whole(
    q: Tensor, kv_cache: KVCache, attn: AttentionMetadata, options: AttentionOptions, out: Tensor
) -> None:
    """Write the results of tokens that see others after them over those of causal attention."""
    assert options.scale is not None
    for block in attn.whole_blocks:
        count = block.end - block.first
        paged_attention_reference(
            q[block.first : block.end],
            *kv_cache,
            attn.block_table[block.row : block.row + 1],
            torch.tensor([0, count], dtype=torch.int32),
            torch.tensor([block.seq_len], dtype=torch.int32),
            options.scale,
            out[block.first : block.end],
            options.window,
            options.softcap,
            options.alibi_slopes,
            options.sinks,
            options.k_scale,
            options.v_scale,
            options.chunk,
            is_causal=False,
            whole_from=block.begin,
        )


def _attend_paged(
    q: Tensor, kv_cache: KVCache, attn: AttentionMetadata, options: AttentionOptions, out: Tensor | None
) -> Tensor:
    assert options.scale is not None
    return paged_attention(
        q,
        *kv_cache,
        attn.block_table,
        attn.query_start_loc,
        attn.seq_lens,
        options.scale,
        out,
        num_decodes=attn.num_decodes,
        max_decode_len=attn.max_decode_len,
        window=options.window,
        softcap=options.softcap,
        alibi_slopes=options.alibi_slopes,
        sinks=options.sinks,
        k_scale=options.k_scale,
        v_scale=options.v_scale,
        chunk=options.chunk,
    )


class TokenMajorBackend(AttentionBackend):
    """A backend over a library whose caches are [num_blocks, block_size, num_kv_heads, head_dim]."""

    def kv_cache_shape(self, num_blocks: int, block_size: int, num_kv_heads: int, head_dim: int) -> tuple[int, ...]:
        return (num_blocks, block_size, num_kv_heads, head_dim)

    def _of_operations(self, kv_cache: KVCache) -> KVCache:
        return kv_cache[0].transpose(1, 2), kv_cache[1].transpose(1, 2)


class PagedAttention(AttentionBackend):
    """Attention by `vllm.ops`; the cache's layout is the one that suits `device`."""

    name = "paged"
    options = frozenset({"window", "softcap", "alibi_slopes", "sinks", "chunk"})

    def __init__(self, device: torch.device | str = "cpu") -> None:
        self._shape = kv_cache_shape if torch.device(device).type == "cpu" else kv_rows_shape

    def kv_cache_shape(self, num_blocks: int, block_size: int, num_kv_heads: int, head_dim: int) -> tuple[int, ...]:
        return self._shape(num_blocks, block_size, num_kv_heads, head_dim)

    def _attend(
        self, q: Tensor, kv_cache: KVCache, attn: AttentionMetadata, options: AttentionOptions, out: Tensor | None
    ) -> Tensor:
        return _attend_paged(q, kv_cache, attn, options, out)
