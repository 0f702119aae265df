"""Finds the transport that a trainer or an engine asks for."""

from __future__ import annotations

import importlib
from typing import Any, ClassVar

from vllm.upstream.weights.transfer import (
    TrainerInitInfo,
    TrainerWeightTransferEngine,
    VLLMWeightSyncClient,
    WeightSource,
)
from vllm.upstream.weights.transports import refuse_transfer

Entry = type | tuple[str, str]


class _Registry:
    """Transports by name: classes, or (module, class name), imported when used."""

    _engines: ClassVar[dict[str, Entry]]

    @classmethod
    def register_engine(cls, name: str, module_path_or_cls: str | type, class_name: str | None = None) -> None:
        """Add a transport.

        Raises:
            ValueError: there is one of that name, or a module without the name of a class.
        """
        if name in cls._engines:
            raise ValueError(f"there is a weight transfer engine {name!r} already")
        if isinstance(module_path_or_cls, str):
            if class_name is None:
                raise ValueError(f"class_name must say which class of {module_path_or_cls} to use")
            cls._engines[name] = module_path_or_cls, class_name
        else:
            cls._engines[name] = module_path_or_cls

    @classmethod
    def _find(cls, name: str) -> Any:
        entry = cls._engines.get(name)
        if entry is None:
            refuse_transfer(f"the transport {name!r}")
        return getattr(importlib.import_module(entry[0]), entry[1]) if isinstance(entry, tuple) else entry


class WeightTransferTrainerFactory(_Registry):
    """Transports of trainers. "nccl" goes over gloo, "ipc" by files in the memory that a machine's processes share."""

    _engines: ClassVar[dict[str, Entry]] = {
        "nccl": ("vllm.upstream.weights.trainers", "GroupTrainer"),
        "ipc": ("vllm.upstream.weights.trainers", "SharedMemoryTrainer"),
    }

    @classmethod
    def trainer_init(
        cls, init_info: TrainerInitInfo, *, client: VLLMWeightSyncClient, source: WeightSource | None = None
    ) -> TrainerWeightTransferEngine[Any]:
        """Meet the engines by the transport that `init_info` is of.

        Raises:
            NotImplementedError: a transport that was not registered.
        """
        engine: TrainerWeightTransferEngine[Any] = cls._find(init_info.backend).trainer_init(
            init_info, client=client, source=source
        )
        return engine


class WeightTransferEngineFactory(_Registry):
    """Transports of engines. They can be registered, and are refused when one is to be made."""

    _engines: ClassVar[dict[str, Entry]] = {}

    @classmethod
    def create_engine(cls, config: Any, vllm_config: Any, device: Any, model: Any) -> Any:
        """
        Raises:
            NotImplementedError: always.
        """
        refuse_transfer("create_engine")
