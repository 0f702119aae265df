"""Which KV cache manager a model's layers need."""

from __future__ import annotations

from dataclasses import replace

from vllm.config import CacheConfig
from vllm.v1.core.kv_cache_groups import GroupedKVCacheManager
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.core.state_cache import StateCacheManager


def make_kv_cache_manager(config: CacheConfig) -> KVCacheManager:
    """The manager for the config's groups and states."""
    if config.num_states is not None:
        # Blocks without the state at their end begin nothing.
        caches = config.enable_prefix_caching and config.num_snapshots > 0
        return StateCacheManager(replace(config, enable_prefix_caching=caches))
    return KVCacheManager(config) if config.group_windows == (None,) else GroupedKVCacheManager(config)
