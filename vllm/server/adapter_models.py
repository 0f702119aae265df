"""LoRA adapters as models of the server: by the names that requests give as `model`."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Iterable, Sequence
from contextvars import ContextVar
from dataclasses import replace

from vllm import envs
from vllm.entrypoints.async_llm import AsyncLLM
from vllm.exceptions import VLLMValidationError
from vllm.logger import init_logger
from vllm.lora.request import NOT_ENABLED, LoRARequest
from vllm.lora.resolver import FilesystemResolver, LoRAResolverRegistry
from vllm.server.errors import ApiError
from vllm.server.lora_modules import LoRAModulePath

logger = init_logger(__name__)

chosen: ContextVar[LoRARequest | None] = ContextVar("adapter of the HTTP request", default=None)
"""The adapter that the HTTP request that is being answered named as its model; None: the model itself."""


class ServedAdapters:
    """The adapters that a server has by name."""

    def __init__(self, modules: Iterable[LoRAModulePath]) -> None:
        self._modules = list(modules)
        self._ids = itertools.count(1)
        self._lock = asyncio.Lock()
        self.by_name: dict[str, LoRARequest] = {}
        if folder := envs.adapter_folder():
            LoRAResolverRegistry.register_resolver("Filesystem Resolver", FilesystemResolver(folder))

    def check_engine(self, engine: AsyncLLM) -> None:
        """ValueError: modules were named, and the engine has no adapters."""
        if self._modules and engine.vllm_config.lora_config is None:
            raise ValueError(f"--lora-modules: {NOT_ENABLED}")

    async def load_modules(self, engine: AsyncLLM, base_names: Sequence[str]) -> None:
        """Load what the arguments name, once.

        Raises:
            VLLMValidationError: one that cannot be loaded.
        """
        modules, self._modules = self._modules, []
        for each in modules:
            await self.load(engine, base_names, each.name, each.path, base_model_name=each.base_model_name)

    async def load(
        self,
        engine: AsyncLLM,
        base_names: Sequence[str],
        name: str,
        path: str,
        *,
        load_inplace: bool = False,
        base_model_name: str | None = None,
        is_3d_lora_weight: bool = False,
    ) -> None:
        """Load an adapter for requests that name it.

        Args:
            base_names: of the model, which no adapter can have.
            load_inplace: again, if there is one of that name.

        Raises:
            VLLMValidationError: the name is in use, or the adapter cannot be loaded; nothing has changed then.
        """
        async with self._lock:
            known = self.by_name.get(name)
            if name in base_names:
                raise VLLMValidationError(f"lora_name {name!r} is the model's own name", "lora_name", name)
            if known is not None and not load_inplace:
                raise VLLMValidationError(
                    f"the adapter {name!r} is loaded already; load_inplace loads it again", "lora_name", name
                )
            number = next(self._ids) if known is None else known.lora_int_id
            request = LoRARequest(name, number, path, base_model_name, load_inplace, is_3d_lora_weight)
            await engine.add_lora(request)
            self.by_name[name] = replace(request, load_inplace=False)
            logger.info("adapter %s is loaded", name)

    async def unload(self, engine: AsyncLLM, name: str) -> None:
        """Forget an adapter; requests that run finish with it.

        Raises:
            ApiError: 404, there is none.
        """
        async with self._lock:
            known = self.by_name.pop(name, None)
            if known is None:
                raise ApiError(404, f"there is no adapter {name!r} here", "lora_name", "model_not_found")
            await engine.remove_lora(known.lora_int_id)
            logger.info("adapter %s is unloaded", name)

    async def find(self, engine: AsyncLLM, base_names: Sequence[str], name: str) -> LoRARequest | None:
        """The adapter of that name; one that a resolver knows is loaded, if adapters may come at run time.

        Raises:
            VLLMValidationError: a resolver's adapter that cannot be loaded.
        """
        known = self.by_name.get(name)
        is_open = envs.allows_adapter_updates() and engine.vllm_config.lora_config is not None
        if known is not None or not is_open:
            return known
        for resolver in list(LoRAResolverRegistry.resolvers.values()):
            found = await resolver.resolve_lora(base_names[0], name)
            if found is None:
                continue
            try:
                await self.load(engine, base_names, name, found.lora_path, is_3d_lora_weight=found.is_3d_lora_weight)
            except VLLMValidationError as error:
                # Another request may have loaded it meanwhile. The client did not name the path.
                if name not in self.by_name:
                    message = str(error.args[0]).replace(found.lora_path, name)
                    raise VLLMValidationError(message, "model", name) from None
            return self.by_name.get(name)
        return None
