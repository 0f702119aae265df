"""What a trainer sets so that its products are computed as the engine's with VLLM_BATCH_INVARIANT=1."""

from __future__ import annotations

import os

import torch

from vllm import envs


def vllm_is_batch_invariant() -> bool:
    """Whether VLLM_BATCH_INVARIANT=1."""
    return envs.batch_invariant()


def init_batch_invariance() -> None:
    """With VLLM_BATCH_INVARIANT=1: one order of sums in this process's products and collectives. The engine needs no
    call of it."""
    if not vllm_is_batch_invariant():
        return
    for name, value in (("NCCL_ALGO", "Ring"), ("NCCL_PROTO", "Simple"), ("CUBLAS_WORKSPACE_CONFIG", ":16:8")):
        os.environ.setdefault(name, value)
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction = False
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
