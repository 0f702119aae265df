"""Processors of images and sounds: there are none, inputs are text."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

_INSTEAD = "only text models are served; describe the medium in the prompt, or send it to a model that reads it"


def refuse_media(what: str) -> NoReturn:
    """
    Args:
        what: was asked for.

    Raises:
        NotImplementedError: always.
    """
    raise NotImplementedError(f"{what}: {_INSTEAD}")


class MultiModalRegistry:
    """Upstream's registry of processors, without any."""

    def supports_multimodal_inputs(self, model_config: Any) -> bool:
        """False: no model has them."""
        return False

    def register_processor(self, processor: Any, *, info: Any = None, dummy_inputs: Any = None) -> Callable[..., Any]:
        """
        Raises:
            NotImplementedError: always.
        """
        refuse_media("MULTIMODAL_REGISTRY.register_processor")

    def create_processor(self, model_config: Any, *, tokenizer: Any = None, cache: Any = None) -> Any:
        """
        Raises:
            NotImplementedError: always.
        """
        refuse_media("MULTIMODAL_REGISTRY.create_processor")


MULTIMODAL_REGISTRY = MultiModalRegistry()
