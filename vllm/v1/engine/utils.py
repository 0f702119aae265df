"""Processes of engine cores, in upstream's words."""

from __future__ import annotations

from typing import ClassVar

from vllm.utils.unserved import Unserved


class CoreEngineProcManager(Unserved):
    """Starts cores without a server."""

    instead: ClassVar[str] = "one server starts all its cores: vllm serve --data-parallel-size, or AsyncLLM"
