"""`current_platform`: the device that the engine would run on. Importing it looks for a GPU, and so imports torch."""

from __future__ import annotations

from vllm.platforms.interface import (
    CpuArchEnum,
    CpuPlatform,
    CudaPlatform,
    DeviceCapability,
    Platform,
    PlatformEnum,
)
from vllm.utils.device import cuda_problem

current_platform: Platform = CudaPlatform() if cuda_problem() is None else CpuPlatform()

__all__ = ["CpuArchEnum", "DeviceCapability", "Platform", "PlatformEnum", "current_platform"]
