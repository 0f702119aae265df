"""Makes the scheduler's side of a store, where an engine can have one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from vllm.config import VllmConfig
from vllm.logger import init_logger, warn_once
from vllm.ops.block_copies import block_sums
from vllm.utils.host_memory import available_bytes
from vllm.utils.kv_store.blocks import BlockStore
from vllm.utils.kv_store.folder import StoreFolder
from vllm.utils.kv_store.segment import Bytes
from vllm.v1.core.guests import SchedulerGuest
from vllm.v1.features.kv_store.identity import about, problem_of, shelf_of
from vllm.v1.features.kv_store.runner import layout_of, whole_layout
from vllm.v1.features.kv_store.scheduler import StoredPrefixes

logger = init_logger(__name__)

_LEAST_STAGED_BYTES = 256 * 2**20
_STAGED_SHARE = 0.25


def make_store_guest(config: VllmConfig, call: Callable[[Any, tuple], Any], scheduler: Any) -> Sequence[SchedulerGuest]:
    """One guest, or none, with a warning: the engine runs without a store, as its folder cannot be used, or it has
    something that the store does not keep."""
    cache = config.cache_config
    problem = problem_of(config)
    folder = StoreFolder(Path(cache.kv_store).expanduser(), cache.kv_store_gib)
    shelf = ""
    if problem is None:
        try:
            folder.open()
            shelf = shelf_of(config, whole_layout(call(layout_of, ())))
        except OSError as error:
            problem = str(error)
    if problem is not None:
        warn_once(logger, "kv_store=%r is not used: %s", cache.kv_store, problem)
        return ()
    logger.info("kv_store: %s, as %s", folder.path, shelf)
    most_staged = max(int(available_bytes() * _STAGED_SHARE), _LEAST_STAGED_BYTES)
    has_stages = config.parallel_config.pipeline_parallel_size > 1
    store = BlockStore(folder, shelf, about(config), _sums_of)
    return (StoredPrefixes(scheduler, store, cache.kv_store_salted, most_staged, has_stages),)


def _sums_of(data: Bytes, count: int) -> list[int]:
    sums = block_sums(torch.from_numpy(data.reshape(count, -1)))
    found: list[int] = sums.numpy().view(np.uint64).tolist()
    return found
