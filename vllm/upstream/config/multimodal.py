"""Images, videos and sound."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar

from vllm.config.unserved import UnservedConfig, choice, number


@dataclass
class MultiModalConfig(UnservedConfig):
    """How many items of a kind a prompt may hold, and how they are prepared."""

    instead: ClassVar[str] = (
        "limit_mm_per_prompt, mm_processor_kwargs and enable_mm_embeds are arguments of LLM (docs/images.md)"
    )
    # Fields of how media are kept and hashed: without media, nothing is.
    harmless: ClassVar[frozenset[str]] = frozenset(
        {
            "language_model_only", "mm_device_do_normalize", "mm_processor_cache_gb", "mm_processor_cache_type",
            "mm_hasher_algorithm", "mm_shm_cache_max_object_size_mb", "skip_mm_profiling",
        }
    )  # fmt: skip

    language_model_only: bool = False
    limit_per_prompt: dict[str, Any] = field(default_factory=dict)
    enable_mm_embeds: bool = False
    media_io_kwargs: dict[str, dict[str, Any]] = field(default_factory=dict)
    mm_processor_kwargs: dict[str, object] | None = None
    mm_device_do_normalize: bool | None = True
    mm_processor_cache_gb: float = number(4, 0)
    mm_processor_cache_type: str = choice("lru", "shm", "lru")
    mm_hasher_algorithm: str = choice("blake3", "blake3", "sha256", "sha512")
    mm_shm_cache_max_object_size_mb: int = number(128, 0)
    mm_encoder_only: bool = False
    mm_encoder_tp_mode: str = choice("weights", "weights", "data")
    mm_encoder_attn_backend: Any = None
    mm_encoder_attn_dtype: str | None = choice(None, "fp8")
    mm_encoder_fp8_scale_path: str | None = None
    mm_encoder_fp8_scale_save_path: str | None = None
    mm_encoder_fp8_scale_save_margin: float = number(1.5, 0)
    interleave_mm_strings: bool = False
    skip_mm_profiling: bool = False
    video_pruning_rate: float | None = number(None, 0)
    video_pruning_method: str = choice("evs", "evs", "vidcom2")
    mm_tensor_ipc: str = choice("direct_rpc", "direct_rpc", "torch_shm")
    allow_missing_mm_embeddings: bool = False
    mm_ipc_gpu_memory_gb: float = number(0, 0)

    def asked(self) -> dict[str, Any]:
        """See UnservedConfig.asked; limits that rule every item out ask for nothing."""
        found = super().asked()
        if not any(self.limit_per_prompt.values()):
            found.pop("limit_per_prompt", None)
        return found
