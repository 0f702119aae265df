"""Whether VLLM_BATCH_INVARIANT=1 can be kept: every kernel between a token and its readings must compute a row alike
whatever rows stand beside it."""

from __future__ import annotations

from vllm import envs
from vllm.ops._dispatch import LIBRARY, cpu_ops


def check_batch_invariance(device: str) -> None:
    """Refuse what VLLM_BATCH_INVARIANT=1 cannot be kept with.

    Args:
        device: "cpu" or "cuda".

    Raises:
        ValueError: the device, a variable or the missing library would bring in kernels whose sums depend on the batch.
    """
    if device != "cpu":
        reason = f"it is kept on the CPU only, got device={device!r}"
    elif envs.ops_reference():
        reason = "VLLM_OPS=reference computes with PyTorch, whose order of sums follows the shape of the batch"
    elif envs.cpu_gemm() == "onednn":
        reason = "VLLM_CPU_GEMM=onednn multiplies with oneDNN, whose order of sums follows the shape of the batch"
    elif cpu_ops() is None:
        reason = (
            f"it needs the C++ kernels, and {LIBRARY} is missing or does not load: PyTorch, which runs in their place, "
            "orders its sums by the shape of the batch"
        )
    else:
        return
    raise ValueError(f"VLLM_BATCH_INVARIANT=1 cannot be kept: {reason}")
