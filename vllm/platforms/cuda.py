"""CudaPlatform, under upstream's path."""

from vllm.platforms.interface import CudaPlatform

__all__ = ["CudaPlatform"]
