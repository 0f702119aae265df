"""Upstream's settings of kernels."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar

from vllm.config.unserved import UnservedConfig


@dataclass
class KernelConfig(UnservedConfig):
    """Which of upstream's kernels run."""

    instead: ClassVar[str] = "kernels are chosen by device and dtype; VLLM_CPU_GEMM and attention_backend choose others"
    # How kernels are tuned before the first request.
    harmless: ClassVar[frozenset[str]] = frozenset(
        {"enable_flashinfer_autotune", "enable_cutedsl_warmup", "enable_jit_warmup"}
    )

    ir_op_priority: Any = None
    enable_flashinfer_autotune: bool | None = None
    enable_rocm_segmented_attn_autotune: bool = False
    enable_cutedsl_warmup: bool = True
    enable_jit_warmup: bool = True
    monokernel: bool = False
    moe_backend: str = "auto"
    sparse_indexer_topk_backend: str = "auto"
    linear_backend: str = "auto"
    linear_backend_per_quant: dict[str, str] | None = field(default=None)
