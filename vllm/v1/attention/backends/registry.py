"""Names of attention backends, for attention_backend and AttentionConfig."""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum

from vllm.utils.unserved import refuse


class AttentionBackendEnum(Enum):
    """Upstream's backends. The engine takes each for the one of its own that is nearest, and says which."""

    FLASH_ATTN = "flash_attn"
    FLASH_ATTN_DIFFKV = "flash_attn_diffkv"
    TRITON_ATTN = "triton_attn"
    TRITON_ATTN_DIFFKV = "triton_attn_diffkv"
    ROCM_ATTN = "rocm_attn"
    ROCM_AITER_MLA = "rocm_aiter_mla"
    ROCM_AITER_FA = "rocm_aiter_fa"
    ROCM_AITER_UNIFIED_ATTN = "rocm_aiter_unified_attn"
    TORCH_SDPA = "torch_sdpa"
    FLASHINFER = "flashinfer"
    FLASHINFER_MLA = "flashinfer_mla"
    TRITON_MLA = "triton_mla"
    CUTLASS_MLA = "cutlass_mla"
    FLASHMLA = "flashmla"
    FLASHMLA_SPARSE = "flashmla_sparse"
    FLASH_ATTN_MLA = "flash_attn_mla"
    NO_ATTENTION = "no_attention"
    FLEX_ATTENTION = "flex_attention"
    TREE_ATTN = "tree_attn"
    CPU_ATTN = "cpu_attn"
    CUSTOM = "custom"


def register_backend(backend: AttentionBackendEnum, class_path: str | None = None, is_mamba: bool = False) -> Callable:
    """
    Raises:
        NotImplementedError: always.
    """
    refuse("register_backend", "backends are the engine's own: attention_backend is paged, varlen or flashinfer")
