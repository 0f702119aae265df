"""What upstream's models read beside their inputs while they run."""

from __future__ import annotations

from typing import Any, ClassVar

from vllm.utils.unserved import Unserved, refuse

_INSTEAD = "models here are called with their batch: vllm.attention.backend.AttentionMetadata is an argument"


class ForwardContext(Unserved):
    """Of one step."""

    instead: ClassVar[str] = _INSTEAD


def is_forward_context_available() -> bool:
    """False: there is none."""
    return False


def get_forward_context() -> ForwardContext:
    """
    Raises:
        NotImplementedError: always.
    """
    refuse("get_forward_context", _INSTEAD)


def set_forward_context(attn_metadata: Any, vllm_config: Any, *args: Any, **kwargs: Any) -> Any:
    """
    Raises:
        NotImplementedError: always.
    """
    refuse("set_forward_context", _INSTEAD)
