"""Upstream's settings of attention backends."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar

from vllm.config.unserved import UnservedConfig, choice


@dataclass
class AttentionConfig(UnservedConfig):
    """The attention backend and the settings of upstream's own. `backend` is the engine's attention_backend."""

    instead: ClassVar[str] = (
        "it is a setting of an attention backend that is not there; attention_backend chooses between paged, varlen "
        "and flashinfer"
    )
    # Bounds and block sizes of kernels that do not run here.
    harmless: ClassVar[frozenset[str]] = frozenset(
        {
            "backend", "flash_attn_max_num_splits_for_cuda_graph", "tokenspeed_mla_min_split_kv",
            "tq_max_kv_splits_for_cuda_graph", "indexer_tp_shard_min_rows", "flex_attn_block_m", "flex_attn_block_n",
            "flex_attn_q_block_size", "flex_attn_kv_block_size", "disable_flashinfer_q_quantization",
        }
    )  # fmt: skip

    backend: Any = None
    minimax_m3_msa_decode_backend: str = "triton"
    backend_per_kind: dict[str, Any] = field(default_factory=dict)
    flash_attn_version: int | None = choice(None, 2, 3, 4)
    flash_attn_max_num_splits_for_cuda_graph: int = 32
    tokenspeed_mla_min_split_kv: int = 1
    tq_max_kv_splits_for_cuda_graph: int = 32
    use_trtllm_attention: bool | None = None
    disable_flashinfer_q_quantization: bool = False
    mla_prefill_backend: Any = None
    use_prefill_query_quantization: bool = False
    trtllm_ragged_backend: str = "trtllm-gen"
    indexer_kv_dtype: str = "auto"
    indexer_sparse_logits: bool = False
    indexer_tp_shard_min_rows: int = 65536
    minimax_m3_indexer_cp: bool = False
    hisparse_config: Any = None
    use_non_causal: bool = False
    sparse_mla_force_mqa: bool = False
    sparse_mla_prefill_workspace_factor: int | None = None
    flex_attn_block_m: int | None = None
    flex_attn_block_n: int | None = None
    flex_attn_q_block_size: int | None = None
    flex_attn_kv_block_size: int | None = None
