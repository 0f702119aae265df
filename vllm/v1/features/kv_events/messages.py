"""Messages that tell others which blocks the prefix cache has, in upstream's form: msgpack arrays, whose events begin
with their class's name."""

from __future__ import annotations

from typing import Any

from vllm.utils.struct import Struct

ExternalBlockHash = bytes | int
"""A block's hash as other processes see it."""


class EventBatch(Struct, array_like=True, omit_defaults=True, gc=False):
    """Events of one moment: `ts`, in seconds since 1970."""

    ts: float
    events: list[Any]
    data_parallel_rank: int | None = None


class KVCacheEvent(Struct, array_like=True, omit_defaults=True, gc=False, tag=True):
    """Base of the events."""


class BlockStored(KVCacheEvent):
    """Blocks are in the cache, one after the other; the first follows `parent_block_hash`."""

    block_hashes: list[ExternalBlockHash]
    parent_block_hash: ExternalBlockHash | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str | None
    lora_name: str | None


class BlockRemoved(KVCacheEvent):
    """Blocks are gone."""

    block_hashes: list[ExternalBlockHash]
    medium: str | None


class AllBlocksCleared(KVCacheEvent):
    """The cache is empty."""


class KVEventBatch(EventBatch):
    """The events that there are."""

    events: list[BlockStored | BlockRemoved | AllBlocksCleared]
