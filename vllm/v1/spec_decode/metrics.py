"""How many of the drafted tokens were right."""

from __future__ import annotations

from typing import ClassVar

from vllm.utils.unserved import Unserved


class SpecDecodingStats(Unserved):
    """Of a step."""

    instead: ClassVar[str] = "tokens are not drafted ahead; there is nothing to count"
