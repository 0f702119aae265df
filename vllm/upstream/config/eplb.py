"""Upstream's settings of the placement of experts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from vllm.config.unserved import UnservedConfig, number


@dataclass
class EPLBConfig(UnservedConfig):
    """How experts are moved between ranks as their load changes."""

    instead: ClassVar[str] = "experts stay on their ranks"
    harmless: ClassVar[frozenset[str]] = frozenset({"window_size", "step_interval", "use_async"})

    window_size: int = number(1000, 1)
    step_interval: int = number(3000, 1)
    num_redundant_experts: int = number(0, 0)
    log_balancedness: bool = False
    log_balancedness_interval: int = number(1, 1)
    use_async: bool = True
    policy: str = "default"
    communicator: str | None = None
    enable_migration_batching: bool = False
