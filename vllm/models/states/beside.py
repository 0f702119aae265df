"""Attention and a state of one layer, as its BesideSpec says."""

from __future__ import annotations

from torch import Tensor, nn

from vllm.attention.backend import AttentionMetadata, KVCache
from vllm.models.attention import DecoderAttention, RotaryTables
from vllm.models.spec import BesideSpec
from vllm.models.states.make import make_state_layer
from vllm.ops.elementwise import added
from vllm.ops.rms_norm import AddedNorm


class AttentionBeside(nn.Module):
    """The sum of what both give."""

    def __init__(self, spec: BesideSpec, hidden_size: int, tables: RotaryTables) -> None:
        super().__init__()
        self.attention = DecoderAttention(spec.attention, hidden_size, tables)
        self.state = make_state_layer(spec.state, hidden_size)

    def forward(
        self,
        positions: Tensor,
        hidden: Tensor,
        kv_cache: KVCache,
        attn: AttentionMetadata,
        rows: Tensor | None,
        norm: AddedNorm | None,
    ) -> Tensor:
        """[T, H], to which `norm` is applied first -> [T, H], or [L, H] for the tokens in `rows`."""
        if norm is not None:
            hidden = norm(hidden)
        attended = self.attention(positions, hidden, kv_cache, attn, rows, None)
        return added(self.state(positions, hidden, kv_cache, attn, rows, None), attended)
