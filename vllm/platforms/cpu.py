"""CpuPlatform, under upstream's path."""

from vllm.platforms.interface import CpuPlatform

__all__ = ["CpuPlatform"]
