"""Types around an engine: errors, and what its steps exchange."""

from __future__ import annotations

from collections.abc import ItemsView
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Literal, get_args

from vllm.exceptions import GenerationError
from vllm.pooling_params import PoolingTask

if TYPE_CHECKING:
    import torch


GenerationTask = Literal["generate", "transcription", "realtime"]
SupportedTask = Literal[GenerationTask, PoolingTask, "render"]
GENERATION_TASKS = get_args(GenerationTask)
POOLING_TASKS = get_args(PoolingTask)


class EngineGenerateError(GenerationError):
    """A request failed, and the engine goes on."""


@dataclass
class IntermediateTensors:
    """Named tensors that one stage of a pipeline hands to the next; there is one stage here."""

    tensors: dict[str, torch.Tensor]

    def __getitem__(self, key: str) -> torch.Tensor:
        return self.tensors[key]

    def __setitem__(self, key: str, value: torch.Tensor) -> None:
        self.tensors[key] = value

    def __len__(self) -> int:
        return len(self.tensors)

    def items(self) -> ItemsView[str, torch.Tensor]:
        """(name, tensor) of each."""
        return self.tensors.items()


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
