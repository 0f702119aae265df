"""The engine's configuration: one frozen dataclass a concern, derived values as properties."""

from vllm.config.cache import CacheConfig
from vllm.config.device import DeviceConfig
from vllm.config.model import ATTENTION_BACKENDS, DTYPES, LOAD_FORMATS, QUANTIZATIONS, ModelConfig
from vllm.config.parallel import EXECUTOR_BACKENDS, ParallelConfig
from vllm.config.scheduler import POLICIES, SchedulerConfig
from vllm.config.vllm import VllmConfig

__all__ = [
    "ATTENTION_BACKENDS",
    "CacheConfig",
    "DTYPES",
    "DeviceConfig",
    "EXECUTOR_BACKENDS",
    "LOAD_FORMATS",
    "ModelConfig",
    "POLICIES",
    "ParallelConfig",
    "QUANTIZATIONS",
    "SchedulerConfig",
    "VllmConfig",
]
