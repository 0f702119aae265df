"""Figures for Ray's own collection."""

from __future__ import annotations

from typing import ClassVar

from vllm.utils.unserved import Unserved


class RayPrometheusStatLogger(Unserved):
    """Hands them to Ray."""

    instead: ClassVar[str] = "read LLM.get_metrics, the server's /metrics, or RequestOutput.metrics"
