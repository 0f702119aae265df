"""How many states of requests, and snapshots of them, a memory budget holds beside the KV cache."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from vllm.config import VllmConfig

_MOST_SNAPSHOTS = 512
# A step with a share of a prompt that ends at a snapshot must be large enough to be efficient.
_LEAST_INTERVAL, _SHARES_OF_A_STEP = 512, 4


class StateSlots(NamedTuple):
    """Rows of the state pools."""

    num_requests: int = 0  # that can have a state at once
    num_snapshots: int = 0  # kept for prefixes to come
    snapshot_interval: int = 0  # tokens after which one is made
    num_backups: int = 0  # of requests' states before their drafts

    def cache_fields(self) -> dict[str, Any]:
        """The fields of CacheConfig that say the same."""
        return {
            "num_states": self.num_requests or None,
            "num_snapshots": self.num_snapshots,
            "snapshot_interval": self.snapshot_interval or None,
        }

    def num_bytes(self, state_bytes: int) -> int:
        """The bytes of all, with the row of padding."""
        num_rows = self.num_requests + 1 + self.num_snapshots + self.num_backups
        return num_rows * state_bytes if self.num_requests else 0


NO_STATES = StateSlots()


def fewest(slots: Sequence[StateSlots]) -> StateSlots:
    """The rows that all ranks have room for; one whose layers have no states has room for any number."""
    found = [each for each in slots if each.num_requests]
    return StateSlots(*map(min, zip(*found, strict=True))) if found else NO_STATES


def plan_states(config: VllmConfig, state_bytes: int, budget: int, block_bytes: int) -> StateSlots:
    """The rows for a model with `state_bytes` of state a request: of `budget` bytes, which the KV cache is part of, at
    most half is for the states of up to max_num_seqs requests, and a quarter for snapshots. Where the number of KV
    blocks is set, it says nothing of memory: then each request has a state. Unless the config says how often one is
    kept, it is where keys and values, of `block_bytes` a block, are as large as a state. ValueError: the budget does
    not hold one state.
    """
    cache, most = config.cache_config, config.scheduler_config.max_num_seqs
    if not state_bytes:
        return StateSlots()
    rows_of_request = 1 if config.speculative_config is None else 2
    if cache.num_blocks is not None:
        num_requests, num_snapshots = most, min(2 * most, _MOST_SNAPSHOTS)
    else:
        num_requests = min((budget // 2 // state_bytes - 1) // rows_of_request, most)
        num_snapshots = min(budget // 4 // state_bytes, _MOST_SNAPSHOTS)
    if num_requests < 1:
        raise ValueError(
            f"The cache budget of {budget / 2**30:.2f} GiB does not hold the state of one request, "
            f"{state_bytes / 2**30:.3f} GiB, beside keys and values. Raise kv_cache_memory_bytes, "
            "VLLM_CPU_KVCACHE_SPACE or gpu_memory_utilization."
        )
    least = max(_LEAST_INTERVAL, config.scheduler_config.max_num_batched_tokens // _SHARES_OF_A_STEP)
    blocks = max(-(-state_bytes // block_bytes) if block_bytes else 0, -(-least // cache.block_size))
    interval = cache.snapshot_interval or blocks * cache.block_size
    num_backups = (rows_of_request - 1) * num_requests
    return StateSlots(num_requests, num_snapshots if cache.enable_prefix_caching else 0, interval, num_backups)
