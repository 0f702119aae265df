"""Attention of tokens to all others of their sequence, before and after them, without a cache."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from vllm.attention.backend import PLAIN, AttentionBackend, KVCache
from vllm.attention.options import AttentionOptions
from vllm.ops.packed_attention import packed_attention
from vllm.ops.rotary import rotary_embedding_


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

    @cached_property
    def cu_seqlens(self) -> Tensor:
        """Where each sequence begins, and the last one's end: int32 [B + 1], on the CPU."""
        return torch.tensor([0, *accumulate(self.lengths)], dtype=torch.int32, device="cpu")

    @cached_property
    def seqused_k(self) -> Tensor | None:
        """`attended`, int32 [B] on the CPU."""
        return None if self.attended is None else torch.tensor(self.attended, dtype=torch.int32, device="cpu")


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
    scale = q.shape[-1] ** -0.5 if options.scale is None else options.scale
    window = None if options.window is None else (options.window - 1, options.window - 1)
    others = window, options.softcap, options.alibi_slopes, sequences.seqused_k
    return packed_attention(q, k, v, sequences.cu_seqlens, scale, *others)
