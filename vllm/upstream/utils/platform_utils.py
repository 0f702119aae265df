"""Properties of the machine."""

from __future__ import annotations


def cuda_is_initialized() -> bool:
    """Whether this process has started CUDA."""
    import torch

    return torch.cuda.is_initialized()


def is_pin_memory_available() -> bool:
    """Whether host memory can be pinned for a device: on CUDA."""
    import torch

    return torch.cuda.is_available()


def num_compute_units(device_id: int = 0) -> int:
    """Multiprocessors of a CUDA device; 0 without one."""
    import torch

    return torch.cuda.get_device_properties(device_id).multi_processor_count if torch.cuda.is_available() else 0
