"""Settings of the device."""

from __future__ import annotations

from dataclasses import dataclass

from vllm.config.checks import one_of


@dataclass(frozen=True)
class DeviceConfig:
    """The device that runs the model: "cpu" or "cuda"."""

    device: str = "cpu"

    def __post_init__(self) -> None:
        one_of("device", self.device, ("cpu", "cuda"))
