"""Checks of environment variables against the arguments."""

from __future__ import annotations

from vllm import envs


def check_variables(device: str, tensor_parallel_size: int, disable_custom_all_reduce: bool) -> None:
    """
    Raises:
        ValueError: a variable that cannot be honoured on the device, or with these arguments.
    """
    from vllm.ops.cpu_kernels import check_batch_invariance

    if envs.batch_invariant():
        check_batch_invariance(device)
        if tensor_parallel_size > 2 - (device == "cuda") and (device == "cuda" or disable_custom_all_reduce):
            asked = "tensor_parallel_size" if device == "cuda" else "disable_custom_all_reduce"
            raise ValueError(f"VLLM_BATCH_INVARIANT=1 rules out {asked}: gloo and NCCL add in no one order")
    if device == "cpu":
        envs.cpu_gemm()  # an error if it is no layout
