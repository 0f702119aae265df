"""Sources of LoRA adapters. They can be registered; adapters are not served, so none is asked."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Set as AbstractSet

from vllm.lora.request import LoRARequest


class LoRAResolver(ABC):
    """A source of adapters."""

    @abstractmethod
    async def resolve_lora(self, base_model_name: str, lora_name: str) -> LoRARequest | None:
        """The adapter; None: it is not here."""


class _LoRAResolverRegistry:
    def __init__(self) -> None:
        self.resolvers: dict[str, LoRAResolver] = {}

    def get_supported_resolvers(self) -> AbstractSet[str]:
        """Their names."""
        return self.resolvers.keys()

    def register_resolver(self, resolver_name: str, resolver: LoRAResolver) -> None:
        """Add one, in the place of one of the same name."""
        self.resolvers[resolver_name] = resolver

    def get_resolver(self, resolver_name: str) -> LoRAResolver:
        """
        Raises:
            KeyError: no such resolver.
        """
        if resolver_name not in self.resolvers:
            known = ", ".join(self.resolvers) or "none"
            raise KeyError(f"no LoRA resolver {resolver_name!r}; there are: {known}")
        return self.resolvers[resolver_name]


LoRAResolverRegistry = _LoRAResolverRegistry()


def get_adapter_absolute_path(lora_path: str) -> str:
    """A folder's absolute path, `~` and relative paths resolved; a name of the hub as it is: nothing is downloaded."""
    path = os.path.expanduser(lora_path)
    return os.path.abspath(path) if os.path.exists(path) else lora_path
