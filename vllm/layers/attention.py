"""The attention layer: keys and values into the cache, then the backend's attention."""

from __future__ import annotations

from dataclasses import replace
from typing import ClassVar

from torch import Tensor, nn

from vllm.attention.backend import AttentionBackend, AttentionMetadata, KVCache, PagedAttention
from vllm.attention.options import AttentionOptions
from vllm.layers.absent_modules import all_modules
from vllm.layers.rotary_embedding import RotaryEmbedding
from vllm.ops.rotary import rotary_embedding_

__all__ = ["Attention", "AttentionOptions", "attention_layers", "use_backend", "use_kv_scales"]


class Attention(nn.Module):
    """Causal attention with grouped key/value heads over the paged cache, by `backend`; see `use_backend`.

    Args:
        head_dim: D, size of a head's query, key and value.
        scale: factor on the scores, positive, for layers without other options; None = head_dim ** -0.5.
        rotary: rotates queries and keys first.
        options: window, soft-cap, ALiBi, sinks, scale; not together with `scale`.
        num_kv_heads: this rank's key/value heads, where they are not the config's; None = the config's.
        kv_sharing_target: index, among the model's layers, of the layer whose keys and values this one reads; it
            writes none, and has that layer's window. None = its own.
    """

    is_latent: ClassVar[bool] = False
    """Whether the cache has one row a token that is its key, and of which the first part is its value."""

    def __init__(
        self,
        head_dim: int,
        scale: float | None = None,
        rotary: RotaryEmbedding | None = None,
        options: AttentionOptions | None = None,
        num_kv_heads: int | None = None,
        kv_sharing_target: int | None = None,
    ) -> None:
        super().__init__()
        options = AttentionOptions(scale) if options is None else options
        assert scale is None or scale == options.scale, "the scale of a layer with options is one of these"
        self.options = replace(options, scale=head_dim**-0.5 if options.scale is None else options.scale)
        self.rotary = rotary
        self.head_dim = head_dim
        self.num_kv_heads = num_kv_heads
        self.kv_sharing_target = kv_sharing_target
        self.k_scale = self.v_scale = 1.0  # the checkpoint's, for a cache of 8-bit floats
        self.kv_group = 0  # whose block table it has; set by the runner
        self.backend: AttentionBackend = PagedAttention()

    def forward(
        self,
        q: Tensor,
        k: Tensor | None,
        v: Tensor | None,
        kv_cache: KVCache,
        attn: AttentionMetadata,
        rows: Tensor | None = None,
        positions: Tensor | None = None,
    ) -> Tensor:
        """Store this step's keys and values, then attend: [T or L, Hq * D].

        Args:
            q, k, v: [T, Hq, D], [T, Hkv, D] and [T, Hkv, D]; a rotary rotates q and k in place. k and v are None
                where another layer's are read.
            kv_cache: this layer's, or that of the layer whose keys and values it reads.
            rows: int64 [L], tokens whose result is returned; None = all.
            positions: int64 [T], for a rotary.
        """
        if self.kv_group:
            attn = attn.groups[self.kv_group - 1]
        self._store(q, k, v, kv_cache, attn, positions)
        if rows is not None and not rows.shape[0]:
            return q.new_empty(0, q.shape[1] * q.shape[2])
        out = self.backend.attend(q, kv_cache, attn, self.options).flatten(1)
        return out if rows is None else out.index_select(0, rows)

    def _store(
        self,
        q: Tensor,
        k: Tensor | None,
        v: Tensor | None,
        kv_cache: KVCache,
        attn: AttentionMetadata,
        positions: Tensor | None,
    ) -> None:
        """Rotate q and k, and write k and v."""
        if self.kv_sharing_target is not None:
            assert k is None and v is None, "a layer that reads another layer's keys and values has none"
            if self.rotary is not None:
                assert positions is not None
                rotary_embedding_(positions, q, q[:, :0], self.rotary.cos_sin_cache)
            return
        assert k is not None and v is not None
        if self.rotary is None:
            self.backend.write_kv(k, v, kv_cache, attn, self.options)
        else:
            assert positions is not None
            cos_sin_cache = self.rotary.cos_sin_cache
            self.backend.rotate_and_write_kv(positions, q, k, v, cos_sin_cache, kv_cache, attn, self.options)


def attention_layers(model: nn.Module, with_absent: bool = False) -> list[Attention]:
    """A model's attention layers, in their order; `with_absent`: those of other stages, too, which have no memory."""
    modules = all_modules(model) if with_absent else model.modules()
    return [module for module in modules if isinstance(module, Attention)]


def use_kv_scales(model: nn.Module) -> None:
    """Let all attention layers of a model quantise keys and values with their checkpoint's scales; a layer that reads
    another one's, with that one's."""
    layers = attention_layers(model)
    for layer in layers:
        source = layer if layer.kv_sharing_target is None else layers[layer.kv_sharing_target]
        layer.options = replace(layer.options, k_scale=source.k_scale, v_scale=source.v_scale)


def use_backend(model: nn.Module, backend: AttentionBackend) -> None:
    """Set the backend of all attention layers of a model; its caches must then have that backend's layout."""
    for layer in attention_layers(model):
        layer.backend = backend
