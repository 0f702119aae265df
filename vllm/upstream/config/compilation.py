"""Compilation and CUDA graphs."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

from vllm.config.unserved import UnservedConfig, number
from vllm.exceptions import VLLMValidationError


class CompilationMode(enum.IntEnum):
    """How much torch compiles of the model."""

    NONE = 0
    STOCK_TORCH_COMPILE = 1
    DYNAMO_TRACE_ONCE = 2
    VLLM_COMPILE = 3


class CUDAGraphMode(enum.Enum):
    """Which steps are replayed from CUDA graphs; a pair holds the mode of decode steps and that of the others."""

    NONE = 0
    PIECEWISE = 1
    FULL = 2
    FULL_DECODE_ONLY = (2, 0)
    FULL_AND_PIECEWISE = (2, 1)

    def decode_mode(self) -> CUDAGraphMode:
        """The mode of decode steps."""
        return CUDAGraphMode(self.value[0]) if isinstance(self.value, tuple) else self

    def mixed_mode(self) -> CUDAGraphMode:
        """The mode of steps that hold prompts."""
        return CUDAGraphMode(self.value[1]) if isinstance(self.value, tuple) else self

    def separate_routine(self) -> bool:
        """Whether the two differ."""
        return isinstance(self.value, tuple)

    def has_mode(self, mode: CUDAGraphMode) -> bool:
        """Whether `mode` is one of the two."""
        return mode in (self.decode_mode(), self.mixed_mode())

    def has_full_cudagraphs(self) -> bool:
        """Whether any step is replayed whole."""
        return self.has_mode(CUDAGraphMode.FULL)


class DynamicShapesType(str, enum.Enum):
    """Torch's compiler assumes this of sizes that change."""

    BACKED = "backed"
    UNBACKED = "unbacked"
    BACKED_SIZE_OBLIVIOUS = "backed_size_oblivious"


@dataclass
class DynamicShapesConfig(UnservedConfig):
    """How sizes that change are compiled."""

    instead: ClassVar[str] = "nothing is compiled: layers call fused kernels themselves"

    type: DynamicShapesType = DynamicShapesType.BACKED
    evaluate_guards: bool = False
    assume_32_bit_indexing: bool = False


@dataclass
class PassConfig(UnservedConfig):
    """Which passes rewrite the compiled model."""

    instead: ClassVar[str] = "nothing is compiled: layers call fused kernels themselves"

    fuse_norm_quant: bool | None = None
    fuse_act_quant: bool | None = None
    fuse_attn_quant: bool | None = None
    eliminate_noops: bool = True
    fuse_allreduce_rms: bool | None = None
    enable_qk_norm_rope_fusion: bool | None = None
    fuse_rope_kvcache_cat_mla: bool | None = None
    fuse_act_padding: bool | None = None
    fuse_mla_dual_rms_norm: bool | None = None
    fuse_rope_kvcache: bool | None = None
    fuse_qk_norm_rope_kvcache: bool | None = None
    rope_kvcache_fusion_max_token_num: int = 256
    fi_allreduce_fusion_max_size_mb: float | None = None


@dataclass
class CompilationConfig(UnservedConfig):
    """Compilation and replay. The settings change how fast results come, never which: the engine decides whether
    it refuses one or says that it has no effect.

    Raises:
        VLLMValidationError: no such mode.
    """

    instead: ClassVar[str] = (
        "nothing is compiled; enforce_eager=True replays nothing, max_seq_len_to_capture bounds what is replayed"
    )
    harmless: ClassVar[frozenset[str]] = frozenset(
        {"cache_dir", "debug_dump_path", "cudagraph_num_of_warmups", "cudagraph_copy_inputs"}
    )

    mode: Any = None
    debug_dump_path: Path | None = None
    cache_dir: str = ""
    compile_cache_save_format: str = "binary"
    backend: str = ""
    custom_ops: list[str] = field(default_factory=list)
    ir_enable_torch_wrap: bool | None = None
    splitting_ops: list[str] | None = None
    compile_mm_encoder: bool = False
    cudagraph_mm_encoder: bool = False
    encoder_cudagraph_token_budgets: list[int] = field(default_factory=list)
    encoder_cudagraph_max_vision_items_per_batch: int = number(0, 0)
    encoder_cudagraph_max_frames_per_batch: int | None = number(None, 0)
    cudagraph_decoder_replay: bool = True
    decoder_replay_cudagraph_capture_sizes: list[int] = field(default_factory=list)
    decoder_replay_trim_threshold: int = number(768, 0)
    compile_sizes: list[int | str] | None = None
    compile_ranges_endpoints: list[int] | None = None
    inductor_compile_config: dict[str, Any] = field(default_factory=dict)
    inductor_passes: dict[str, str] = field(default_factory=dict)
    cudagraph_mode: Any = None
    cudagraph_num_of_warmups: int = number(0, 0)
    cudagraph_capture_sizes: list[int] | None = None
    cudagraph_copy_inputs: bool = False
    cudagraph_specialize_lora: bool = True
    use_inductor_graph_partition: bool | None = None
    pass_config: Any = field(default_factory=PassConfig)
    max_cudagraph_capture_size: int | None = number(None, 0)
    dynamic_shapes_config: Any = None
    fast_moe_cold_start: bool | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        self.mode = _member("mode", CompilationMode, self.mode)
        self.cudagraph_mode = _member("cudagraph_mode", CUDAGraphMode, self.cudagraph_mode)
        if isinstance(self.pass_config, dict):
            self.pass_config = PassConfig(**self.pass_config)

    def asked(self) -> dict[str, Any]:
        """See UnservedConfig.asked."""
        found = super().asked()
        if self.cudagraph_mode is CUDAGraphMode.NONE:
            found.pop("cudagraph_mode")
        return found


def _member(name: str, kind: type[enum.Enum], value: Any) -> Any:
    """The member that the value is, or names, or numbers."""
    if value is None or isinstance(value, kind):
        return value
    if isinstance(value, str) and value.upper() in kind.__members__:
        return kind[value.upper()]
    try:
        return kind(value)
    except ValueError:
        names = ", ".join(kind.__members__)
        raise VLLMValidationError(f"{name} must be one of {names}", parameter=name, value=value) from None
