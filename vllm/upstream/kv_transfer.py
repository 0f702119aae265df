"""KV blocks that leave their engine: messages of the prefix cache's events, and connectors, both of which are the
engine's own. Upstream's connectors are not here."""

from __future__ import annotations

from typing import ClassVar

from vllm.upstream.refusals import Unserved
from vllm.v1.features.kv_connector.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorOutput,
    KVConnectorRole,
    SupportsHMA,
    supports_hma,
)
from vllm.v1.features.kv_connector.factory import KVConnectorFactory
from vllm.v1.features.kv_connector.views import StepAttention
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
    "AttentionMetadata",
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
    "KVConnectorOutput",
    "KVConnectorRole",
    "KVEventBatch",
    "SupportsHMA",
    "supports_hma",
]

BlockHash = bytes
AttentionMetadata = StepAttention


class ExampleConnectorMetadata(KVConnectorMetadata):
    """The connector tells this to the workers'."""


class ExampleConnector(Unserved):
    """Keeps caches as files."""

    instead: ClassVar[str] = "kv_store keeps blocks on disk (docs/kv_store.md)"
