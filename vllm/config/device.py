"""The device."""

from __future__ import annotations

from dataclasses import dataclass

from vllm.config.checks import one_of


@dataclass(frozen=True)
class DeviceConfig:
    """Where the model runs: "cpu" or "cuda"."""

    device: str = "cpu"

    def __post_init__(self) -> None:
        one_of("device", self.device, ("cpu", "cuda"))
