"""News of KV blocks for others."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from vllm.config.unserved import UnservedConfig, choice, number


@dataclass
class KVEventsConfig(UnservedConfig):
    """Upstream's settings of events about the cache's blocks."""

    instead: ClassVar[str] = "no news of KV blocks is published; /metrics tells of the prefix cache"
    harmless: ClassVar[frozenset[str]] = frozenset(
        {"publisher", "endpoint", "replay_endpoint", "buffer_steps", "hwm", "max_queue_size", "topic"}
    )

    enable_kv_cache_events: bool = False
    publisher: Literal["null", "zmq"] | None = choice(None, "null", "zmq")
    endpoint: str = "tcp://*:5557"
    replay_endpoint: str | None = None
    buffer_steps: int = number(10_000, 0)
    hwm: int = number(100_000, 0)
    max_queue_size: int = number(100_000, 0)
    topic: str = ""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.publisher is None:
            self.publisher = "zmq" if self.enable_kv_cache_events else "null"
