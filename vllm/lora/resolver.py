"""Where adapters come from that a request names and the server does not have."""

from __future__ import annotations

import json
import os
from abc import ABC, abstractmethod
from collections.abc import Set as AbstractSet
from pathlib import Path

from vllm.lora.request import LoRARequest


class LoRAResolver(ABC):
    """A source of adapters."""

    @abstractmethod
    async def resolve_lora(self, base_model_name: str, lora_name: str) -> LoRARequest | None:
        """The adapter for the model that the server serves under that name; None: it is not here."""


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
            raise KeyError(f"LoRA resolver {resolver_name!r} not found; there are: {known}")
        return self.resolvers[resolver_name]


LoRAResolverRegistry = _LoRAResolverRegistry()
"""Asked in the order in which they were registered, usually by a plug-in (`vllm.general_plugins`)."""


class FilesystemResolver(LoRAResolver):
    """The folders in a folder: `NAME/adapter_config.json` is the adapter NAME, which may be one like "org/name"."""

    def __init__(self, lora_cache_dir: str) -> None:
        self.lora_cache_dir = lora_cache_dir
        self._num_found = 0

    async def resolve_lora(self, base_model_name: str, lora_name: str) -> LoRARequest | None:
        """None: no such folder, or one of another kind or for another model."""
        if any(part in ("", ".", "..") for part in lora_name.split("/")) or "\0" in lora_name or "\\" in lora_name:
            return None
        folder = Path(self.lora_cache_dir, lora_name)
        try:
            config = json.loads((folder / "adapter_config.json").read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return None
        if not isinstance(config, dict) or config.get("peft_type") != "LORA":
            return None
        base = config.get("base_model_name_or_path")
        # Trained on a copy of it: the name's last part says so.
        if isinstance(base, str) and os.path.basename(base.rstrip("/")) != os.path.basename(base_model_name):
            return None
        self._num_found += 1
        return LoRARequest(lora_name, self._num_found, str(folder))
