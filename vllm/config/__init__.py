"""The engine's configuration: one frozen dataclass a concern, derived values as properties."""

from vllm.config.attention import AttentionConfig
from vllm.config.cache import CacheConfig
from vllm.config.device import DeviceConfig
from vllm.config.load import LOAD_FORMATS
from vllm.config.lora import LoRAConfig
from vllm.config.model import ATTENTION_BACKENDS, DTYPES, MODEL_IMPLS, ModelConfig
from vllm.config.parallel import EXECUTOR_BACKENDS, ParallelConfig
from vllm.config.pooler import PoolerConfig
from vllm.config.profiler import ProfilerConfig
from vllm.config.quantization import QUANTIZATIONS
from vllm.config.scheduler import POLICIES, SchedulerConfig
from vllm.config.speculative import SpeculativeConfig
from vllm.config.structured_outputs import StructuredOutputsConfig
from vllm.config.vllm import VllmConfig

__all__ = [
    "ATTENTION_BACKENDS",
    "AttentionConfig",
    "CacheConfig",
    "DTYPES",
    "DeviceConfig",
    "EXECUTOR_BACKENDS",
    "LOAD_FORMATS",
    "MODEL_IMPLS",
    "LoRAConfig",
    "ModelConfig",
    "POLICIES",
    "ParallelConfig",
    "PoolerConfig",
    "ProfilerConfig",
    "QUANTIZATIONS",
    "SchedulerConfig",
    "SpeculativeConfig",
    "StructuredOutputsConfig",
    "VllmConfig",
]
