"""The engine's configuration: one frozen dataclass a concern, derived values as properties; and, for callers that build
them, configurations of what it does not do (`unserved`)."""

from vllm.config.absent import (
    AuxOutputConfig,
    DiffusionConfig,
    EncoderCacheManagerConfig,
    EngramConfig,
    FaultToleranceConfig,
    HiSparseConfig,
    LoggingConfig,
    MambaConfig,
    SpeechToTextConfig,
    SpeechToTextParams,
    WatchdogConfig,
    WatermarkConfig,
)
from vllm.config.attention import AttentionConfig
from vllm.config.cache import CacheConfig
from vllm.config.compilation import CompilationConfig, CompilationMode, CUDAGraphMode, PassConfig
from vllm.config.current import (
    get_current_vllm_config,
    get_current_vllm_config_or_none,
    set_current_vllm_config,
)
from vllm.config.device import DeviceConfig
from vllm.config.ec_transfer import ECTransferConfig
from vllm.config.eplb import EPLBConfig
from vllm.config.kernel import KernelConfig
from vllm.config.kv_events import KVEventsConfig
from vllm.config.kv_transfer import KVTransferConfig
from vllm.config.load import LOAD_FORMATS, LoadConfig
from vllm.config.lora import LoRAConfig
from vllm.config.model import ATTENTION_BACKENDS, DTYPES, MODEL_IMPLS, ModelConfig
from vllm.config.multimodal import MultiModalConfig
from vllm.config.observability import ObservabilityConfig
from vllm.config.offload import OffloadBackend, OffloadConfig, PrefetchOffloadConfig, UVAOffloadConfig
from vllm.config.parallel import EXECUTOR_BACKENDS, ParallelConfig
from vllm.config.pooler import PoolerConfig
from vllm.config.profiler import ProfilerConfig
from vllm.config.quantization import QUANTIZATIONS
from vllm.config.reasoning import ReasoningConfig
from vllm.config.scheduler import POLICIES, SchedulerConfig
from vllm.config.speculative import SpeculativeConfig
from vllm.config.structured_outputs import StructuredOutputsConfig
from vllm.config.utils import replace, update_config
from vllm.config.vllm import VllmConfig
from vllm.config.weight_transfer import WeightTransferConfig

__all__ = [
    "AuxOutputConfig",
    "DiffusionConfig",
    "EncoderCacheManagerConfig",
    "EngramConfig",
    "FaultToleranceConfig",
    "HiSparseConfig",
    "LoggingConfig",
    "MambaConfig",
    "SpeechToTextConfig",
    "SpeechToTextParams",
    "WatchdogConfig",
    "WatermarkConfig",
    "ATTENTION_BACKENDS",
    "AttentionConfig",
    "CUDAGraphMode",
    "CacheConfig",
    "CompilationConfig",
    "CompilationMode",
    "DTYPES",
    "DeviceConfig",
    "ECTransferConfig",
    "EPLBConfig",
    "EXECUTOR_BACKENDS",
    "KVEventsConfig",
    "KVTransferConfig",
    "KernelConfig",
    "LOAD_FORMATS",
    "MODEL_IMPLS",
    "LoRAConfig",
    "LoadConfig",
    "ModelConfig",
    "MultiModalConfig",
    "ObservabilityConfig",
    "OffloadBackend",
    "OffloadConfig",
    "POLICIES",
    "ParallelConfig",
    "PassConfig",
    "PoolerConfig",
    "PrefetchOffloadConfig",
    "ProfilerConfig",
    "QUANTIZATIONS",
    "ReasoningConfig",
    "SchedulerConfig",
    "SpeculativeConfig",
    "StructuredOutputsConfig",
    "UVAOffloadConfig",
    "VllmConfig",
    "WeightTransferConfig",
    "get_current_vllm_config",
    "get_current_vllm_config_or_none",
    "replace",
    "set_current_vllm_config",
    "update_config",
]
