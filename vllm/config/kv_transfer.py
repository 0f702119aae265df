"""Settings of a connector, which carries KV blocks from one engine to another."""

from __future__ import annotations

import uuid
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

from vllm.config.unserved import UnservedConfig, choice
from vllm.exceptions import VLLMValidationError

KVProducer = Literal["kv_producer", "kv_both"]
KVConsumer = Literal["kv_consumer", "kv_both"]
KVRole = Literal["kv_producer", "kv_both", "kv_consumer"]


@dataclass
class KVTransferConfig(UnservedConfig):
    """Who sends KV blocks, who receives them, and by what.

    Attributes:
        kv_connector: a registered name, or a class of kv_connector_module_path; None: there is no connector.
        kv_role: what the engine does with it, which the connector itself has to heed.
        kv_connector_module_path: the module of the class.
        kv_connector_extra_config: settings of the connector's own.
        engine_id: for the connector; left out, a random one.
        kv_load_failure_policy: blocks that the connector cannot load are computed, or the requests that need them end.

    Raises:
        VLLMValidationError: a connector without a role, or an unknown role.
    """

    instead: ClassVar[str] = "an argument of the engine has it: kv_transfer_config"
    harmless: ClassVar[frozenset[str]] = frozenset({"kv_buffer_device", "kv_port", "engine_id"})

    kv_connector: str | None = None
    engine_id: str | None = None
    kv_buffer_device: str = "cuda"
    kv_role: KVRole | None = choice(None, "kv_producer", "kv_both", "kv_consumer")
    kv_port: int = 14579
    kv_connector_extra_config: dict[str, Any] = field(default_factory=dict)
    kv_connector_module_path: str | None = None
    enable_permute_local_kv: bool = False
    kv_load_failure_policy: Literal["recompute", "fail"] = choice("fail", "recompute", "fail")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.kv_connector is not None and self.kv_role is None:
            raise VLLMValidationError("kv_connector needs kv_role", parameter="kv_role")
        if self.kv_connector is not None and self.engine_id is None:
            self.engine_id = str(uuid.uuid4())

    def check_is_done(self) -> None:
        """VLLMValidationError: a value that the engine does not do."""
        if self.kv_connector is None:
            raise VLLMValidationError(
                "kv_transfer_config: kv_connector is not given; name the class, or leave the configuration out",
                parameter="kv_transfer_config",
            )
        if self.enable_permute_local_kv:
            raise VLLMValidationError(
                "kv_transfer_config: enable_permute_local_kv=True is not done, as blocks have one layout; leave it out",
                parameter="kv_transfer_config",
            )

    @property
    def recomputes(self) -> bool:
        """Whether blocks that cannot be loaded are computed."""
        return self.kv_load_failure_policy == "recompute"
