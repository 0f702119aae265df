"""The attention layer: keys and values into the cache, then the kernel. The rest is the model's business."""

from __future__ import annotations

from torch import Tensor, nn

from vllm.v1.attention.metadata import AttentionMetadata
from vllm.v1.attention.paged import attend, write_kv


class Attention(nn.Module):
    """Causal attention with grouped key/value heads over the paged cache.

    Args:
        head_dim: width of a head.
        scale: factor on the scores; head_dim ** -0.5 when left out.
    """

    def __init__(self, head_dim: int, scale: float | None = None) -> None:
        super().__init__()
        self.scale = head_dim**-0.5 if scale is None else scale

    def forward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        kv_cache: tuple[Tensor, Tensor],
        attn: AttentionMetadata,
        rows: Tensor | None = None,
    ) -> Tensor:
        """Store this step's keys and values, then attend.

        Args:
            q: [T, Hq, D].
            k: [T, Hkv, D].
            v: [T, Hkv, D].
            kv_cache: the layer's key and value cache.
            rows: int64 [L] tokens whose result is wanted; None = all.

        Returns:
            [T or L, Hq * D].
        """
        write_kv(k, v, kv_cache, attn)
        if rows is not None and not rows.shape[0]:
            return q.new_empty(0, q.shape[1] * q.shape[2])
        out = attend(q, kv_cache, attn, self.scale).flatten(1)
        return out if rows is None else out.index_select(0, rows)
