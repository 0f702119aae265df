"""How many KV blocks fit: on the device by gpu_memory_utilization, in the host's memory by swap_space."""

from __future__ import annotations

import torch

from vllm.config import VllmConfig
from vllm.distributed.communicator import Communicator, split_kv_heads


def kv_block_bytes(config: VllmConfig, group: Communicator) -> int:
    """Bytes of this rank's keys and values in a block."""
    hf = config.model_config.hf_config
    num_kv_heads = len(split_kv_heads(hf.num_key_value_heads, group.world_size)[group.rank])
    width = 2 * hf.num_hidden_layers * num_kv_heads * hf.head_dim
    return width * config.cache_config.block_size * _item_bytes(config)


def hidden_block_bytes(config: VllmConfig) -> int:
    """Bytes of a block's final hidden states, which prompt readings keep beside keys and values."""
    if not config.cache_config.enable_prefix_caching:
        return 0
    return config.model_config.hf_config.hidden_size * config.cache_config.block_size * _item_bytes(config)


def host_block_count(config: VllmConfig, block_bytes: int, available_bytes: int) -> int:
    """How many host blocks of `block_bytes` a rank gets by `swap_space`.

    Args:
        available_bytes: of the host's memory, for all ranks and replicas.

    Raises:
        ValueError: they do not fit there, or swap_space does not hold one block.
    """
    cache, parallel = config.cache_config, config.parallel_config
    if not cache.swap_space or not cache.enable_prefix_caching:
        return 0
    num_devices = parallel.tensor_parallel_size * parallel.data_parallel_size
    asked_gib, available_gib = num_devices * cache.swap_space, available_bytes / 2**30
    if asked_gib > available_gib:
        raise ValueError(
            f"swap_space={cache.swap_space:g} GiB for each of {num_devices} devices is {asked_gib:g} GiB, and "
            f"{available_gib:.2f} GiB of the host's memory are available: lower it to at most "
            f"{available_gib / num_devices:.2f}"
        )
    num_blocks = int(cache.swap_space * 2**30) // block_bytes
    if not num_blocks:
        raise ValueError(
            f"swap_space={cache.swap_space:g} GiB does not hold one KV block of {block_bytes / 2**30:.3g} GiB: raise "
            "it, or set it to 0 to do without"
        )
    return num_blocks


def available_host_bytes() -> int:
    """Memory that can be had without swapping, from /proc/meminfo; 8 GiB where there is none."""
    try:
        with open("/proc/meminfo", encoding="ascii") as lines:
            for line in lines:
                if line.startswith("MemAvailable:"):
                    return int(line.split()[1]) * 1024
    except OSError:
        pass
    return 8 * 2**30


def _item_bytes(config: VllmConfig) -> int:
    dtype: torch.dtype = getattr(torch, config.model_config.dtype)
    return dtype.itemsize
