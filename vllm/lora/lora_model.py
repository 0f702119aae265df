"""Adapters, loaded."""

from __future__ import annotations

from typing import ClassVar

from vllm.utils.unserved import Unserved


class LoRAModel(Unserved):
    """An adapter."""

    instead: ClassVar[str] = "adapters are not served: merge them into the weights (peft: merge_and_unload)"
