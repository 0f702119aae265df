"""Marks in generated texts: none is made, and none is looked for."""

from __future__ import annotations

from typing import ClassVar

from vllm.utils.unserved import Unserved


class GumbelWatermarkDetector(Unserved):
    """Finds upstream's mark."""

    instead: ClassVar[str] = "texts are not watermarked here, and marks of other engines are not looked for"
