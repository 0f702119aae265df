"""Encoder outputs that one engine hands to another."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

from vllm.config.unserved import UnservedConfig, choice

ECProducer = Literal["ec_producer", "ec_both"]
ECConsumer = Literal["ec_consumer", "ec_both"]
ECRole = Literal["ec_producer", "ec_both", "ec_consumer"]


@dataclass
class ECTransferConfig(UnservedConfig):
    """Who sends encoder outputs, who receives them, and by what."""

    instead: ClassVar[str] = "encoders of pictures run in the engine that reads them"
    harmless: ClassVar[frozenset[str]] = frozenset({"engine_id", "ec_buffer_device", "ec_buffer_size"})

    ec_connector: str | None = None
    engine_id: str | None = None
    ec_buffer_device: str | None = "cuda"
    ec_buffer_size: float = 1e9
    ec_role: ECRole | None = choice(None, "ec_producer", "ec_both", "ec_consumer")
    ec_ip: str = "127.0.0.1"
    ec_port: int = 14579
    ec_connector_extra_config: dict[str, Any] = field(default_factory=dict)
    ec_connector_module_path: str | None = None
