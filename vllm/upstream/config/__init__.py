"""Names of `vllm.config` for callers that build configurations of what the engine does not do."""

from vllm.config.kv_events import KVEventsConfig
from vllm.config.kv_transfer import KVTransferConfig
from vllm.upstream.config.compilation import CompilationConfig, CompilationMode, CUDAGraphMode, PassConfig
from vllm.upstream.config.current import (
    get_current_vllm_config,
    get_current_vllm_config_or_none,
    set_current_vllm_config,
)
from vllm.upstream.config.ec_transfer import ECTransferConfig
from vllm.upstream.config.eplb import EPLBConfig
from vllm.upstream.config.kernel import KernelConfig
from vllm.upstream.config.load import LoadConfig
from vllm.upstream.config.multimodal import MultiModalConfig
from vllm.upstream.config.observability import ObservabilityConfig
from vllm.upstream.config.offload import OffloadBackend, OffloadConfig, PrefetchOffloadConfig, UVAOffloadConfig
from vllm.upstream.config.reasoning import ReasoningConfig
from vllm.upstream.config.utils import replace, update_config
from vllm.upstream.config.weight_transfer import WeightTransferConfig

__all__ = [
    "CUDAGraphMode",
    "CompilationConfig",
    "CompilationMode",
    "ECTransferConfig",
    "EPLBConfig",
    "KVEventsConfig",
    "KVTransferConfig",
    "KernelConfig",
    "LoadConfig",
    "MultiModalConfig",
    "ObservabilityConfig",
    "OffloadBackend",
    "OffloadConfig",
    "PassConfig",
    "PrefetchOffloadConfig",
    "ReasoningConfig",
    "UVAOffloadConfig",
    "WeightTransferConfig",
    "get_current_vllm_config",
    "get_current_vllm_config_or_none",
    "replace",
    "set_current_vllm_config",
    "update_config",
]
