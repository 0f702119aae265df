"""Settings of the events that tell others of KV blocks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from vllm.config.unserved import UnservedConfig, choice, number


@dataclass
class KVEventsConfig(UnservedConfig):
    """Whether events are published, and where.

    Attributes:
        enable_kv_cache_events: whether they are.
        publisher: "zmq", or "null": nowhere; by default zmq where they are enabled.
        endpoint: of batches; with a * or of ipc:// it is bound, else connected to.
        replay_endpoint: where those that were missed are asked for; None: nowhere.
        buffer_steps: batches that are kept for that.
        hwm: batches that wait for a slow subscriber before more are dropped.
        max_queue_size: batches that wait to be sent before more are dropped.
        topic: the first frame of each message.
    """

    instead: ClassVar[str] = "an argument of the engine has it: kv_events_config"
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

    @property
    def is_served(self) -> bool:
        """Whether events are published."""
        return self.enable_kv_cache_events and self.publisher == "zmq"
