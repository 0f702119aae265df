"""CoreWeave's format of serialised models."""

from __future__ import annotations

from typing import Any, ClassVar

from vllm.utils.unserved import Unserved, refuse

_NOT_READ = "tensorizer's format is not read or written; load a folder of safetensors files"


class TensorizerConfig(Unserved):
    """Where a serialised model lies."""

    instead: ClassVar[str] = _NOT_READ


class TensorizerArgs(Unserved):
    """How it is read."""

    instead: ClassVar[str] = _NOT_READ


def tensorize_vllm_model(engine_args: Any, tensorizer_config: Any, generate_keyfile: bool = True) -> Any:
    """
    Raises:
        NotImplementedError: always.
    """
    refuse("tensorize_vllm_model", _NOT_READ)


def tensorizer_kwargs_arg(value: str) -> dict[str, Any]:
    """
    Raises:
        NotImplementedError: always.
    """
    refuse("tensorizer_kwargs_arg", _NOT_READ)
