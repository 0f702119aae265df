"""Connectors by their names."""

from __future__ import annotations

import importlib
import inspect
from typing import Any, ClassVar

from vllm.config import VllmConfig
from vllm.config.kv_transfer import KVTransferConfig
from vllm.exceptions import VLLMValidationError
from vllm.v1.features.kv_connector.base import KVConnectorBase_V1, KVConnectorRole


class KVConnectorFactory:
    """The classes that were registered, and those that a configuration gives the module of."""

    _registry: ClassVar[dict[str, tuple[str, str]]] = {}

    @classmethod
    def register_connector(cls, name: str, module_path: str, class_name: str) -> None:
        """Name a connector, in the process whose engine uses it; its module is imported when that begins.

        Raises:
            ValueError: there is one of that name.
        """
        if name in cls._registry:
            raise ValueError(f"there is a connector {name!r} already")
        cls._registry[name] = module_path, class_name

    @classmethod
    def get_connector_class(cls, kv_transfer_config: KVTransferConfig) -> type[KVConnectorBase_V1]:
        """
        Raises:
            VLLMValidationError: there is no such module or class, or the class is no connector.
        """
        name, module_path = kv_transfer_config.kv_connector, kv_transfer_config.kv_connector_module_path
        assert name is not None
        if module_path:
            where = module_path, name
        elif name in cls._registry:
            where = cls._registry[name]
        else:
            known = ", ".join(sorted(cls._registry)) or "none"
            raise _refusal(
                f"kv_connector={name!r} is not registered (registered: {known}); name its module by "
                "kv_connector_module_path. Upstream's own connectors are not here: kv_store keeps blocks on disk",
                name,
            )
        try:
            found = getattr(importlib.import_module(where[0]), where[1], None)
        except ImportError as error:
            raise _refusal(f"kv_connector={name!r}: module {where[0]!r} cannot be imported: {error}", name) from error
        if not (isinstance(found, type) and issubclass(found, KVConnectorBase_V1)):
            problem = "has no class" if found is None else "has no KVConnectorBase_V1"
            raise _refusal(f"kv_connector={name!r}: module {where[0]!r} {problem} {where[1]!r}", name)
        if missing := sorted(found.__abstractmethods__):
            raise _refusal(f"kv_connector={name!r} lacks {', '.join(missing)}", name)
        return found

    @classmethod
    def create_connector(
        cls, config: VllmConfig, role: KVConnectorRole, kv_cache_config: Any = None
    ) -> KVConnectorBase_V1:
        """The connector of an engine's side.

        Raises:
            VLLMValidationError: as `get_connector_class`; or it needs another layout of the cache.
        """
        assert config.kv_transfer_config is not None, "kv_transfer_config names no connector"
        kind = cls.get_connector_class(config.kv_transfer_config)
        layout = kind.get_required_kvcache_layout(config)
        if layout not in (None, "HND"):
            name = config.kv_transfer_config.kv_connector
            raise _refusal(f"kv_connector={name!r} needs the layout {layout}; blocks here are HND", name)
        try:
            inspect.signature(kind).bind(config, role, kv_cache_config)
        except TypeError:
            # Classes for older versions take no third argument.
            return kind(config, role)
        return kind(config, role, kv_cache_config)


def _refusal(message: str, name: str | None) -> VLLMValidationError:
    return VLLMValidationError(f"kv_transfer_config: {message}", parameter="kv_transfer_config", value=name)
