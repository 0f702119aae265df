"""Files of sound."""

from __future__ import annotations

from typing import Any

from vllm.multimodal.registry import refuse_media


def load_audio(*args: Any, **kwargs: Any) -> Any:
    """
    Raises:
        NotImplementedError: always.
    """
    refuse_media("load_audio")
