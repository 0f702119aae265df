"""KV blocks that leave their engine: messages of the prefix cache's events, which are the engine's own, and connectors,
of which it has none."""

from __future__ import annotations

import enum
from typing import Any, ClassVar

from vllm.upstream.refusals import Unserved
from vllm.upstream.utils.unserved import refuse
from vllm.v1.features.kv_events.messages import (
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    EventBatch,
    ExternalBlockHash,
    KVCacheEvent,
    KVEventBatch,
)

__all__ = [
    "AllBlocksCleared",
    "BlockHash",
    "BlockRemoved",
    "BlockStored",
    "EventBatch",
    "ExampleConnector",
    "ExampleConnectorMetadata",
    "ExternalBlockHash",
    "KVCacheEvent",
    "KVConnectorBase_V1",
    "KVConnectorFactory",
    "KVConnectorMetadata",
    "KVConnectorRole",
    "KVEventBatch",
    "NO_TRANSFER",
]

BlockHash = bytes


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
