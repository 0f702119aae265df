"""Examples of image files."""

from __future__ import annotations

from typing import ClassVar

from vllm.utils.unserved import Unserved


class ImageAsset(Unserved):
    """One of upstream's files."""

    instead: ClassVar[str] = "only text models are served, and nothing is downloaded"
