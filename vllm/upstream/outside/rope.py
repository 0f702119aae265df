"""Upstream's rotary embedding as a module that is called with positions, queries and keys."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from vllm.config.checkpoint.config import RopeConfig
from vllm.layers import rotary_embedding as ours
from vllm.models.rope_options import RopeDefaults, read_rope
from vllm.ops.rotary import rotary_embedding_
from vllm.upstream.config.current import get_current_vllm_config_or_none


class RotaryEmbedding(nn.Module):
    """Rotates queries and keys by their tokens' positions.

    Args:
        head_size: values of a head.
        rotary_dim: how many of them, the first ones, rotate.
        max_position_embeddings: longest sequence.
        base: of the frequencies.
        is_neox_style: the first half rotates with the second; False: neighbours with each other.
        dtype: not used; rotated in float32.
    """

    def __init__(
        self,
        head_size: int,
        rotary_dim: int,
        max_position_embeddings: int,
        base: float,
        is_neox_style: bool = True,
        dtype: torch.dtype | None = None,
        *,
        rope: RopeConfig | None = None,
    ) -> None:
        super().__init__()
        self.head_size, self.rotary_dim, self.base = head_size, rotary_dim, base
        self.max_position_embeddings, self.is_neox_style = max_position_embeddings, is_neox_style
        rope = RopeConfig(theta=base) if rope is None else rope
        self._table = ours.RotaryEmbedding(rotary_dim, max_position_embeddings, rope)

    @property
    def cos_sin_cache(self) -> Tensor:
        """float32 [max_position_embeddings, rotary_dim], cosines | sines."""
        return self._table.cos_sin_cache

    def forward(self, positions: Tensor, query: Tensor, key: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        """[T] and [T, heads * head_size] each -> both rotated; they may be in the memory of what was given."""
        q, k = self._heads(query), self._heads(query if key is None else key)
        k = k[:, :0] if key is None else k
        if self.is_neox_style:
            rotary_embedding_(positions.flatten(), q, k, self.cos_sin_cache)
        else:
            q, k = self._interleaved(positions.flatten(), q), self._interleaved(positions.flatten(), k)
        return q.reshape(query.shape), None if key is None else k.reshape(key.shape)

    def _heads(self, x: Tensor) -> Tensor:
        return x.reshape(-1, x.shape[-1] // self.head_size if x.dim() == 2 else x.shape[-2], self.head_size)

    def _interleaved(self, positions: Tensor, heads: Tensor) -> Tensor:
        cos, sin = self.cos_sin_cache[positions].unsqueeze(1).chunk(2, dim=-1)
        rotated, rest = heads[..., : self.rotary_dim], heads[..., self.rotary_dim :]
        first, second = rotated[..., ::2].float(), rotated[..., 1::2].float()
        pairs = torch.stack((first * cos - second * sin, second * cos + first * sin), dim=-1)
        return torch.cat((pairs.flatten(-2).to(heads.dtype), rest), dim=-1)


def get_rope(head_size: int, *sizes: Any, **options: Any) -> RotaryEmbedding:
    """A layer's rotary embedding, by upstream's arguments of now or by its former ones:

        get_rope(head_size, max_position, is_neox_style=True, rope_parameters=None, dtype=None)
        get_rope(head_size, rotary_dim, max_position, base, is_neox_style=True, rope_scaling=None, dtype=None,
                 partial_rotary_factor=1.0)

    Raises:
        ValueError: the configuration asks for a rotation that is not served.
        TypeError: an argument is none of these.
    """
    is_former = "rotary_dim" in options or "base" in options or (len(sizes) > 1 and not isinstance(sizes[1], bool))
    return (_former if is_former else _present)(head_size, *sizes, **options)


def _present(
    head_size: int,
    max_position: int,
    is_neox_style: bool = True,
    rope_parameters: dict[str, Any] | None = None,
    dtype: torch.dtype | None = None,
    dual_chunk_attention_config: Any = None,
) -> RotaryEmbedding:
    return _make(head_size, head_size, max_position, is_neox_style, rope_parameters, dual_chunk_attention_config)


def _former(
    head_size: int,
    rotary_dim: int,
    max_position: int,
    base: float = 10000.0,
    is_neox_style: bool = True,
    rope_scaling: dict[str, Any] | None = None,
    dtype: torch.dtype | None = None,
    partial_rotary_factor: float = 1.0,
    dual_chunk_attention_config: Any = None,
) -> RotaryEmbedding:
    params = {**(rope_scaling or {}), "rope_theta": float(base), "partial_rotary_factor": min(partial_rotary_factor, 1)}
    return _make(head_size, rotary_dim, max_position, is_neox_style, params, dual_chunk_attention_config)


def _make(
    head_size: int,
    width: int,
    max_position: int,
    is_neox_style: bool,
    params: dict[str, Any] | None,
    dual_chunks: Any,
) -> RotaryEmbedding:
    if dual_chunks is not None:
        raise ValueError("get_rope: dual_chunk_attention_config is not served: leave it out")
    raw = {"rope_parameters": dict(params or {}), "max_position_embeddings": max_position}
    rope, share = read_rope(raw, "get_rope", RopeDefaults(partial=1.0))
    config = get_current_vllm_config_or_none()
    # A table is as long as the longest sequence of the engine, by which the kinds that grow choose their factors.
    longest = max_position if config is None else config.model_config.max_model_len
    rotary_dim = width if rope.rope_type == "proportional" else int(width * share)
    return RotaryEmbedding(head_size, rotary_dim, longest, rope.theta, is_neox_style, rope=rope)
