"""KV blocks that would leave their engine: events of the prefix cache, and connectors. The engine sends none."""

from __future__ import annotations

import enum
from typing import Any, ClassVar

from vllm.upstream.refusals import Unserved
from vllm.upstream.utils.unserved import refuse
from vllm.utils.struct import Struct

BlockHash = bytes


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
    """Blocks are in the cache."""

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


NO_TRANSFER = "the KV cache stays in its engine; swap_space keeps evicted blocks on the host"


class KVConnectorRole(enum.Enum):
    """Where a connector runs."""

    SCHEDULER = 0
    WORKER = 1


class KVConnectorMetadata:
    """The scheduler's connector tells this to the workers'."""


class KVConnectorBase_V1(Unserved):
    """Base of connectors: classes can be derived, and no instance made."""

    instead: ClassVar[str] = NO_TRANSFER


class ExampleConnectorMetadata(KVConnectorMetadata):
    """The connector tells this to the workers."""


class ExampleConnector(KVConnectorBase_V1):
    """Keeps caches as files."""


class KVConnectorFactory:
    """Connectors can be registered; none is made."""

    _registry: ClassVar[dict[str, tuple[str, str]]] = {}

    @classmethod
    def register_connector(cls, name: str, module_path: str, class_name: str) -> None:
        """Name a connector.

        Raises:
            ValueError: there is one of that name.
        """
        if name in cls._registry:
            raise ValueError(f"there is a connector {name!r} already")
        cls._registry[name] = module_path, class_name

    @classmethod
    def create_connector(cls, config: Any, role: Any, kv_cache_config: Any = None) -> Any:
        """
        Raises:
            NotImplementedError: always.
        """
        refuse("create_connector", NO_TRANSFER)
