"""Settings of the KV cache."""

from __future__ import annotations

import math
import os
from dataclasses import dataclass, field
from typing import NamedTuple

from vllm.config.checks import at_least
from vllm.exceptions import shown
from vllm.utils.checks import check_number

FLOAT8_DTYPES = {"fp8": "float8_e4m3fn", "fp8_e4m3": "float8_e4m3fn", "fp8_e5m2": "float8_e5m2"}
"""Torch's names of the dtypes of 8 bits that a KV cache may have."""


class Chunks(NamedTuple):
    """In place of a window: a query sees the tokens from the last multiple of `size` on."""

    size: int


Window = int | Chunks | None
"""Queries of a layer see so many tokens, themselves included, those of their chunk, or all before them."""


def resolve_cache_dtype(asked: str, model_dtype: str, is_encoder: bool) -> str:
    """A CacheConfig's `cache_dtype` by what was asked for; the model's dtype is "auto".

    Raises:
        ValueError: there is no such cache, or the model is an encoder, which has none.
    """
    if asked in ("auto", model_dtype):
        return "auto"
    if asked not in FLOAT8_DTYPES:
        raise ValueError(
            f"kv_cache_dtype must be auto, {', '.join(FLOAT8_DTYPES)} or the model's dtype ({model_dtype}), got "
            f"{shown(asked)}"
        )
    if is_encoder:
        raise ValueError(f"kv_cache_dtype={asked!r}: the model is an encoder, which has no KV cache; leave it out")
    return asked


@dataclass(frozen=True)
class CacheConfig:
    """The paged KV cache.

    Attributes:
        block_size: tokens a block.
        enable_prefix_caching: keep full blocks of finished requests and share them by content.
        num_blocks: blocks in the pool; None = sized from memory when the engine starts.
        caches_hidden_states: whether blocks of prompts that are read keep their tokens' final hidden states, too.
        shares_parts_of_blocks: whether a cached prefix may end inside a block, of which its new owner gets a copy.
        max_idle_tokens: tokens whose keys and values are kept for requests to come before memory that was not used yet
            is; None = as many as the pool holds. It is the memory in use that this bounds, not the pool.
        memory_bytes: of the pool, where num_blocks is None; None = sized from memory.
        gpu_memory_utilization: fraction of the device's memory that the engine may use (CUDA).
        swap_space: GiB of host memory, for each device, that keep the KV blocks of preempted requests and of prefixes
            that had to make room, so that they are copied back instead of computed again; needs prefix caching.
        num_host_blocks: how many blocks that is, on every rank; set when the engine starts.
        group_windows: what the layers of each KV group see; set when the engine starts.
        num_states: requests that can have a state at once, for models with recurrent states; None: the model has none.
            Set when the engine starts.
        num_snapshots: of states, kept for prefixes to come; set when the engine starts.
        snapshot_interval: tokens after which a state is kept, a multiple of block_size; None = chosen by the sizes of
            states and keys when the engine starts.
        cache_dtype: "auto", the model's, or one of FLOAT8_DTYPES.
        kv_store: folder of a store of blocks that later processes find; "" = none.
        kv_store_gib: the most that the store takes on disk; None: half of what is free or its own.
        kv_store_salted: whether blocks of requests with a cache_salt are written there, too.
        num_gpu_blocks: blocks that the engine has, in a configuration of a running engine's; None before.
    """

    block_size: int = 16
    enable_prefix_caching: bool = True
    num_blocks: int | None = None
    caches_hidden_states: bool = True
    shares_parts_of_blocks: bool = True
    max_idle_tokens: int | None = None
    gpu_memory_utilization: float = 0.9
    swap_space: float = 0.0
    memory_bytes: int | None = None
    num_host_blocks: int = 0
    group_windows: tuple[Window, ...] = (None,)
    num_states: int | None = None
    num_snapshots: int = 0
    snapshot_interval: int | None = None
    cache_dtype: str = "auto"
    kv_store: str = ""
    kv_store_gib: float | None = None
    kv_store_salted: bool = False
    num_gpu_blocks: int | None = field(default=None, repr=False, compare=False)

    @property
    def finds_prefixes(self) -> bool:
        """Whether requests can begin with cached content: blocks without the state at their end begin nothing."""
        return self.enable_prefix_caching and (self.num_states is None or self.num_snapshots > 0)

    @property
    def float8_dtype(self) -> str | None:
        """Torch's name of the cache's dtype; None: it is the model's."""
        return FLOAT8_DTYPES.get(self.cache_dtype)

    def __post_init__(self) -> None:
        at_least("block_size", self.block_size, 1)
        if self.num_blocks is not None:
            at_least("num_gpu_blocks_override", self.num_blocks, 1)
        if self.memory_bytes is not None:
            at_least("kv_cache_memory_bytes", self.memory_bytes, 1)
        if self.snapshot_interval is not None:
            at_least("mamba_block_size", self.snapshot_interval, self.block_size)
            if self.snapshot_interval % self.block_size:
                raise ValueError(
                    f"mamba_block_size must be a multiple of block_size={self.block_size}, got {self.snapshot_interval}"
                )
        check_number("gpu_memory_utilization", self.gpu_memory_utilization, 0, 1, open_low=True)
        check_number("swap_space", self.swap_space, 0, math.inf)
        if not isinstance(self.kv_store, str | os.PathLike):
            raise ValueError(f"kv_store must be the path of a folder, got {self.kv_store!r}")
        if self.kv_store_gib is not None:
            check_number("kv_store_gib", self.kv_store_gib, 0, math.inf, open_low=True)
