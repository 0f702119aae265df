"""What each layer of a model keeps of a token."""

from __future__ import annotations

from typing import NamedTuple

from torch import nn

from vllm.distributed.communicator import Communicator, split_kv_heads
from vllm.model_executor.layers.attention import Attention
from vllm.transformers_utils.config import HFConfig


class KVCacheSpec(NamedTuple):
    """A layer's keys and values on this rank."""

    num_kv_heads: int
    head_dim: int
    window: int | None = None  # tokens that a query sees, itself included; None = all before it
    shared_with: int | None = None  # an earlier layer, whose keys and values these are


def kv_cache_specs(model: nn.Module, config: HFConfig, group: Communicator) -> list[KVCacheSpec]:
    """Of the model's attention layers, in their order.

    Raises:
        ValueError: a layer shares the cache of one that is not before it, or that shares one itself.
    """
    heads = len(split_kv_heads(config.num_key_value_heads, group.world_size)[group.rank])
    layers = [module for module in model.modules() if isinstance(module, Attention)]
    if not layers:
        return [KVCacheSpec(heads, config.head_dim)] * config.num_hidden_layers
    specs: list[KVCacheSpec] = []
    for index, layer in enumerate(layers):
        target = layer.kv_sharing_target
        if target is None:
            own_heads = heads if layer.num_kv_heads is None else layer.num_kv_heads
            specs.append(KVCacheSpec(own_heads, layer.head_dim, layer.options.window))
            continue
        if not 0 <= target < index or specs[target].shared_with is not None:
            raise ValueError(
                f"kv_sharing_target of layer {index} must be an earlier layer with keys and values of its own, "
                f"got {target}"
            )
        specs.append(specs[target]._replace(shared_with=target))
    return specs
