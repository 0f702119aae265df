"""The KV cache's contents for a token, layer by layer."""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

from torch import nn

from vllm.attention.backend import AttentionBackend
from vllm.attention.options import LayerKind
from vllm.config.cache import Chunks, Window
from vllm.config.checkpoint.config import HFConfig
from vllm.distributed.communicator import Communicator, split_kv_heads
from vllm.layers.attention import attention_layers
from vllm.layers.state import state_layers


class KVCacheSpec(NamedTuple):
    """A layer's keys and values on this rank."""

    num_kv_heads: int
    head_dim: int
    window: Window = None  # tokens that a query sees, itself included; None = all before it
    shared_with: int | None = None  # an earlier layer, whose keys and values these are
    is_latent: bool = False  # one row of head_dim values is the key, and its first part the value

    @property
    def values_per_token(self) -> int:
        """Numbers that the cache holds of a token."""
        return self.num_kv_heads * self.head_dim * (1 if self.is_latent else 2)

    @property
    def shape(self) -> tuple[int, int, bool]:
        """The fields that layers which use each other's memory share."""
        return self.num_kv_heads, self.head_dim, self.is_latent

    def cache_shapes(self, backend: AttentionBackend, num_blocks: int, block_size: int) -> tuple[tuple[int, ...], ...]:
        """The shapes of the layer's keys and its values, or of its rows alone."""
        if self.is_latent:
            return ((num_blocks, block_size, self.head_dim),)
        return (backend.kv_cache_shape(num_blocks, block_size, self.num_kv_heads, self.head_dim),) * 2


def kv_cache_specs(model: nn.Module, config: HFConfig, group: Communicator) -> list[KVCacheSpec]:
    """The caches of the model's attention layers, those of all its stages, in their order.

    Raises:
        ValueError: a layer shares the cache of one that is not before it, or that shares one itself.
    """
    layers = attention_layers(model, with_absent=True)
    if not layers and state_layers(model, with_absent=True):
        return []
    heads = len(split_kv_heads(config.num_key_value_heads, group.world_size)[group.rank])
    if not layers:
        return [KVCacheSpec(heads, config.head_dim)] * config.num_hidden_layers
    specs: list[KVCacheSpec] = []
    for index, layer in enumerate(layers):
        target = layer.kv_sharing_target
        if target is None:
            own_heads = heads if layer.num_kv_heads is None else layer.num_kv_heads
            options = layer.options
            window = options.window if options.chunk is None else Chunks(options.chunk)
            own = KVCacheSpec(own_heads, layer.head_dim, window, is_latent=layer.is_latent)
            specs.append(own)
            continue
        if not 0 <= target < index or specs[target].shared_with is not None:
            raise ValueError(
                f"kv_sharing_target of layer {index} must be an earlier layer with keys and values of its own, "
                f"got {target}"
            )
        specs.append(specs[target]._replace(shared_with=target))
    return specs


def layer_kinds(model: nn.Module, config: HFConfig, group: Communicator) -> list[LayerKind]:
    """The options of attention of each of the model's layers, in their order, latent ones apart."""
    # Split evenly, however many key/value heads a layer or a rank has.
    num_heads = config.num_attention_heads // group.world_size
    specs = kv_cache_specs(model, config, group)
    return [
        LayerKind(num_heads, spec.num_kv_heads, spec.head_dim, layer.options)
        for spec, layer in zip(specs, attention_layers(model, with_absent=True), strict=False)
        if not spec.is_latent
    ]


class KVCacheLayout(NamedTuple):
    """Which layers share a block table, and which share memory.

    A block is one piece of every cache. Layers of one window form groups of the same number of layers; a group has a
    block table, and its layers lie in caches that those of other groups lie in, too. So a block belongs to one group at
    a time, and any group may have it.
    """

    windows: tuple[Window, ...]  # of each group; layers that see all tokens come first
    group_of_layer: list[int]
    cache_of_layer: list[int]
    caches: list[KVCacheSpec]  # what a block has of each


def stage_cache_layout(
    model: nn.Module, config: HFConfig, group: Communicator, max_model_len: int, has_one_table: bool
) -> KVCacheLayout:
    """The layout of the model's layers that are here: the groups are those of all its stages, whose blocks have the
    same numbers everywhere. `has_one_table`: see `without_windows`."""
    specs = kv_cache_specs(model, config, group)
    whole = kv_cache_layout(without_windows(specs) if has_one_table else specs, max_model_len)
    layers, here = attention_layers(model, with_absent=True), set(attention_layers(model))
    if len(layers) == len(here):
        return whole
    own = [index for index, layer in enumerate(layers) if layer in here]
    kept = sorted({whole.cache_of_layer[index] for index in own})
    return KVCacheLayout(
        whole.windows,
        [whole.group_of_layer[index] for index in own],
        [kept.index(whole.cache_of_layer[index]) for index in own],
        [whole.caches[index] for index in kept],
    )


def without_windows(specs: list[KVCacheSpec]) -> list[KVCacheSpec]:
    """The same caches, where layers with windows keep the tokens that they do not see any more, and share a table."""
    return [spec._replace(window=None) for spec in specs]


def kv_cache_layout(specs: list[KVCacheSpec], max_model_len: int) -> KVCacheLayout:
    """Groups of layers. A window, or chunks, of max_model_len or more are none. Without layers there is a group, whose
    blocks hold nothing and count tokens."""
    if not specs:
        return KVCacheLayout((None,), [], [], [])
    kinds: dict[Window, list[int]] = {}
    for index, spec in enumerate(specs):
        if spec.shared_with is None:
            window = None if _num_seen(spec.window, max_model_len) >= max_model_len else spec.window
            kinds.setdefault(window, []).append(index)
    ordered = sorted(kinds.items(), key=lambda kind: (kind[0] is not None, _num_seen(kind[0], 0)))
    sizes = [len(layers) for _, layers in ordered]
    shapes = {spec.shape for spec in specs if spec.shared_with is None}
    # Layers of other shapes cannot use each other's memory, so that splitting groups would save nothing.
    size = (
        max(sizes) if len(sizes) == 1 or len(shapes) > 1 else min(range(1, max(sizes) + 1), key=partial(_cost, sizes))
    )
    windows: list[Window] = []
    group_of, cache_of = [0] * len(specs), [0] * len(specs)
    caches: list[KVCacheSpec] = []
    cache_at: dict[tuple[int, int, int, bool], int] = {}
    for window, layers in ordered:
        for place, layer in enumerate(layers):
            if place % size == 0:
                windows.append(window)
            key = (place % size, *specs[layer].shape)
            if key not in cache_at:
                cache_at[key] = len(caches)
                caches.append(specs[layer]._replace(window=None))
            group_of[layer], cache_of[layer] = len(windows) - 1, cache_at[key]
    for layer, spec in enumerate(specs):
        if spec.shared_with is not None:
            group_of[layer], cache_of[layer] = group_of[spec.shared_with], cache_of[spec.shared_with]
    return KVCacheLayout(tuple(windows), group_of, cache_of, caches)


def _num_seen(window: Window, all_tokens: int) -> int:
    """Tokens that a query sees at most, where it is `all_tokens` without a window."""
    if isinstance(window, Chunks):
        return window.size
    return all_tokens if window is None else window


def _cost(sizes: list[int], size: int) -> float:
    """The cost of groups of `size` layers: what padding adds to the layers of each kind, those that see all tokens
    (which have the most blocks) three times, and the work that a block table is."""
    groups = [-(-each // size) for each in sizes]
    padded = [count * size / each for count, each in zip(groups, sizes, strict=True)]
    return 3 * padded[0] + sum(padded[1:]) + 0.05 * sum(groups)
