"""Whether PyTorch's oneDNN multiplies with packed bfloat16 weights here: the only place that asks."""

from __future__ import annotations

import torch

from vllm import envs


def onednn_lacks() -> str | None:
    """What is missing for products with bfloat16 weights in oneDNN's layout; None: nothing."""
    if not torch.backends.mkldnn.is_available():
        return "this PyTorch is built without oneDNN"
    if not torch.ops.mkldnn._is_mkldnn_bf16_supported():
        return "oneDNN packs bfloat16 with AVX-512 (BW, VL and DQ) or AVX-NE-CONVERT, and this CPU has neither"
    return None


def check_cpu_gemm() -> None:
    """
    Raises:
        ValueError: VLLM_CPU_GEMM is no layout, or is one that cannot be had on this CPU.
    """
    if envs.cpu_gemm() == "onednn" and (lacking := onednn_lacks()):
        raise ValueError(f"VLLM_CPU_GEMM=onednn cannot be had: {lacking}; unset the variable")
