"""Finds connectors by name."""

from __future__ import annotations

from typing import Any, ClassVar

from vllm.distributed.kv_transfer.kv_connector.v1.base import NO_TRANSFER
from vllm.utils.unserved import refuse


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
