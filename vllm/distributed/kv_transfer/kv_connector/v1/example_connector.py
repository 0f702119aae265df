"""Upstream's example of a connector."""

from __future__ import annotations

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1, KVConnectorMetadata


class ExampleConnectorMetadata(KVConnectorMetadata):
    """What it tells the workers."""


class ExampleConnector(KVConnectorBase_V1):
    """Keeps caches as files."""
