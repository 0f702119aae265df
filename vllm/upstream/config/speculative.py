"""Speculative decoding."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from vllm.config.unserved import UnservedConfig, choice, number


@dataclass
class SpeculativeConfig(UnservedConfig):
    """Upstream's settings of speculative decoding."""

    instead: ClassVar[str] = (
        "tokens are not drafted ahead: the model itself computes each one; leave it out (outputs are the same)"
    )
    asks_always: ClassVar[bool] = True

    enforce_eager: bool | None = None
    num_speculative_tokens: int | None = number(None, 1)
    model: str | None = None
    method: str | None = None
    draft_tensor_parallel_size: int | None = number(None, 1)
    tensor_parallel_size: int | None = None
    quantization: str | None = None
    moe_backend: str | None = None
    attention_backend: Any = None
    kv_cache_dtype: str | None = None
    max_model_len: int | None = number(None, 1)
    revision: str | None = None
    code_revision: str | None = None
    index_share_for_mtp_iteration: bool | None = None
    disable_padded_drafter_batch: bool = False
    disable_eagle_block_drop: bool = False
    disable_lookahead_block_hashes: bool = False
    draft_lm_head_quantization: Literal["fp8", "nvfp4"] | None = choice(None, "fp8", "nvfp4")
    use_local_argmax_reduction: bool = False
    use_heterogeneous_vocab: bool = False
    prompt_lookup_max: int | None = number(None, 1)
    prompt_lookup_min: int | None = number(None, 1)
    parallel_drafting: bool = False
    target_model_config: Any = None
    target_parallel_config: Any = None
    num_speculative_tokens_per_batch_size: list[tuple[int, int, int]] | None = None
    draft_model_config: Any = None
    draft_parallel_config: Any = None
    suffix_decoding_max_tree_depth: int = 24
    suffix_decoding_max_cached_requests: int = 10_000
    suffix_decoding_max_spec_factor: float = 1.0
    suffix_decoding_min_token_prob: float = 0.1
    draft_load_config: Any = None
    rejection_sample_method: Literal["standard", "synthetic", "block", "fly"] = choice(
        "standard", "standard", "synthetic", "block", "fly"
    )
    synthetic_acceptance_rates: list[float] | None = None
    synthetic_acceptance_length: float | None = None
    enable_adaptive_verification: bool = False
    draft_sample_method: Literal["greedy", "probabilistic"] = choice("greedy", "greedy", "probabilistic")
    dspark_draft_topk: int | None = number(None, 1)
    xpress_topc: int | None = number(None, 0)
    fly_window_size: int | None = number(None, 1)
    fly_entropy_threshold: float = number(0.3, 0)
    fly_entropy_top_k: int = number(3, 1)
