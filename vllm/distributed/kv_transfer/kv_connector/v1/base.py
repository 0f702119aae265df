"""What connectors of callers' own derive from."""

from __future__ import annotations

import enum
from typing import ClassVar

from vllm.utils.unserved import Unserved

NO_TRANSFER = "the KV cache stays in its engine; swap_space keeps evicted blocks on the host"


class KVConnectorRole(enum.Enum):
    """Where a connector runs."""

    SCHEDULER = 0
    WORKER = 1


class KVConnectorMetadata:
    """What the scheduler's connector tells the workers'."""


class KVConnectorBase_V1(Unserved):
    """Base of connectors: classes can be derived, and no instance made."""

    instead: ClassVar[str] = NO_TRANSFER
