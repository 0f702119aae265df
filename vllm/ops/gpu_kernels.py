"""Availability of the GPU's kernels."""

from __future__ import annotations

import torch

from vllm.ops._dispatch import of_device


def compiles_while_running(device: torch.device) -> bool:
    """Whether kernels for this device are compiled at their first launch."""
    if of_device(device.type) != "triton":
        return False
    import triton

    return not triton.knobs.runtime.interpret
