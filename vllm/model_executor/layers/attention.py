"""The attention layer: keys and values into the cache, then the backend's attention."""

from __future__ import annotations

from torch import Tensor, nn

from vllm.attention.backend import AttentionBackend, AttentionMetadata, KVCache, PagedAttention
from vllm.model_executor.layers.rotary_embedding import RotaryEmbedding


class Attention(nn.Module):
    """Causal attention with grouped key/value heads over the paged cache, by `backend`; see `use_backend`. `scale`,
    positive, is the factor on the scores, head_dim ** -0.5 if None; `rotary` rotates queries and keys first."""

    def __init__(self, head_dim: int, scale: float | None = None, rotary: RotaryEmbedding | None = None) -> None:
        super().__init__()
        self.rotary = rotary
        self.scale = head_dim**-0.5 if scale is None else scale
        self.backend: AttentionBackend = PagedAttention()

    def forward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        kv_cache: KVCache,
        attn: AttentionMetadata,
        rows: Tensor | None = None,
        positions: Tensor | None = None,
    ) -> Tensor:
        """Store this step's keys and values, then attend: [T or L, Hq * D].

        Args:
            q, k, v: [T, Hq, D], [T, Hkv, D] and [T, Hkv, D]; a rotary rotates q and k in place.
            rows: int64 [L], tokens whose result is returned; None = all.
            positions: int64 [T], for a rotary.
        """
        if self.rotary is None:
            self.backend.write_kv(k, v, kv_cache, attn)
        else:
            assert positions is not None
            self.backend.rotate_and_write_kv(positions, q, k, v, self.rotary.cos_sin_cache, kv_cache, attn)
        if rows is not None and not rows.shape[0]:
            return q.new_empty(0, q.shape[1] * q.shape[2])
        out = self.backend.attend(q, kv_cache, attn, self.scale).flatten(1)
        return out if rows is None else out.index_select(0, rows)


def use_backend(model: nn.Module, backend: AttentionBackend) -> None:
    """Set the backend of all attention layers of a model; its caches must then have that backend's layout."""
    for module in model.modules():
        if isinstance(module, Attention):
            module.backend = backend
