"""Which CPU kernels there are, and the settings that they rule out."""

from __future__ import annotations

from importlib.util import find_spec

import torch

from vllm import envs
from vllm.ops._dispatch import ISA_LEVELS, LIBRARY, cpu_ops, of_device


def cpu_kernel_isa() -> str | None:
    """Instruction-set level that the C++ kernels run at, one of ISA_LEVELS; None when they are not loaded, or not used
    (VLLM_OPS=reference)."""
    operators = None if envs.ops_reference() else cpu_ops()
    return None if operators is None else ISA_LEVELS[operators.set_isa(-1)]  # -1 changes nothing


def check_batch_invariance(device: str) -> None:
    """Refuse what VLLM_BATCH_INVARIANT=1 cannot be kept with: every kernel between a token and its readings must
    compute a row alike whatever the batch. ValueError where the `device` ("cpu" or "cuda"), a variable or the missing
    library selects kernels whose sums depend on the batch."""
    if envs.ops_reference():
        reason = "VLLM_OPS=reference computes with PyTorch, whose order of sums follows the shape of the batch"
    elif device == "cuda":
        if not envs.use_triton() or find_spec("triton") is None:
            reason = "on CUDA it needs Triton's kernels: install triton, and do not set VLLM_USE_TRITON=0"
        elif torch.cuda.is_available() and torch.cuda.get_device_capability() < (8, 0):
            reason = "on CUDA it needs a compute capability of 8.0"
        else:
            return
    elif cpu_ops() is None:
        reason = (
            f"it needs the C++ kernels, and {LIBRARY} is missing or does not load: PyTorch, which runs in their place, "
            "orders its sums by the shape of the batch"
        )
    else:
        return
    raise ValueError(f"VLLM_BATCH_INVARIANT=1 cannot be kept: {reason}")


def packs_for() -> tuple[str, bool] | None:
    """The traits of the CPU and the kernels that decide how weights are packed: the instruction set in use, and
    whether dot products of bfloat16 are fast; None: operations run their PyTorch references."""
    ops = cpu_ops()
    if ops is None or of_device("cpu") != "cpp":
        return None
    return ISA_LEVELS[ops.set_isa(-1)], ops.has_fast_bf16_dot()
