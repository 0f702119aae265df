"""Memory of a GPU that sleeps."""

from __future__ import annotations

from typing import ClassVar

from vllm.utils.unserved import Unserved


class CuMemAllocator(Unserved):
    """Allocates it."""

    instead: ClassVar[str] = "LLM.sleep and wake_up free and fill it themselves"
