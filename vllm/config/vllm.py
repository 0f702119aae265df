"""The whole configuration of an engine, and checks across its parts."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from vllm import envs
from vllm.config.cache import CacheConfig
from vllm.config.device import DeviceConfig
from vllm.config.kv_events import KVEventsConfig
from vllm.config.kv_transfer import KVTransferConfig
from vllm.config.lora import LoRAConfig
from vllm.config.model import ModelConfig
from vllm.config.parallel import ParallelConfig
from vllm.config.scheduler import SchedulerConfig
from vllm.config.speculative import SpeculativeConfig
from vllm.config.structured_outputs import StructuredOutputsConfig


@dataclass(frozen=True)
class VllmConfig:
    """Everything an engine is built from."""

    model_config: ModelConfig
    cache_config: CacheConfig = field(default_factory=CacheConfig)
    scheduler_config: SchedulerConfig = field(default_factory=SchedulerConfig)
    parallel_config: ParallelConfig = field(default_factory=ParallelConfig)
    device_config: DeviceConfig = field(default_factory=DeviceConfig)
    torch_profiler_dir: str = ""
    """Where traces of start_profile go; "" = nowhere."""
    weight_transfer_config: Any = field(default=None, compare=False)
    """As given: trainers ask a server for it."""
    otlp_traces_endpoint: str | None = field(default=None, repr=False, compare=False)
    """Where spans of requests go; None: nowhere."""
    structured_outputs_config: StructuredOutputsConfig = field(default_factory=StructuredOutputsConfig)
    lora_config: LoRAConfig | None = None
    """None: no adapters."""
    speculative_config: SpeculativeConfig | None = None
    """None: each step computes one token of a request."""
    kv_events_config: KVEventsConfig | None = None
    """None: no events of KV blocks are published."""
    kv_transfer_config: KVTransferConfig | None = None
    """None: no connector carries KV blocks."""

    @property
    def kv_cache_dtype(self) -> str:
        """The KV cache's dtype, as torch names it."""
        return self.cache_config.float8_dtype or self.model_config.dtype

    @property
    def has_one_block_table(self) -> bool:
        """Whether all layers share a block table, so that those with windows keep all tokens: connectors are told of
        one."""
        return self.kv_transfer_config is not None

    def __post_init__(self) -> None:
        self.parallel_config.check_divides(self.model_config.hf_config)
        if self.lora_config is not None:
            self.lora_config.check_dtype(self.model_config.dtype)
        if self.model_config.rounding != "vllm":
            self._check_rounding()
        if self.parallel_config.pipeline_parallel_size > 1:
            self._check_stages()
        if self.kv_transfer_config is not None:
            self._check_connector()

    def _check_connector(self) -> None:
        """ValueError: an option with which a connector would not see all that a block's content depends on."""
        model = self.model_config
        for problem, option in (
            (self.device_config.device != "cpu", "device='cpu'"),
            (
                # Each rank would hear its own connector alone, and schedule other steps than the rest.
                self.parallel_config.tensor_parallel_size > 1
                and self.parallel_config.distributed_executor_backend == "external_launcher",
                "distributed_executor_backend='mp' or 'ray'",
            ),
            (not self.cache_config.enable_prefix_caching, "a causal model and enable_prefix_caching=True"),
            (model.enable_prompt_embeds, "enable_prompt_embeds=False"),
            (bool(self.cache_config.kv_store), "no kv_store"),
        ):
            if problem:
                raise ValueError(f"kv_transfer_config needs {option}")
        recomputes = self.kv_transfer_config is not None and self.kv_transfer_config.recomputes
        for is_ahead, option in (
            (self.scheduler_config.async_scheduling, "async_scheduling=False"),
            (self.parallel_config.pipeline_parallel_size > 1, "pipeline_parallel_size=1"),
        ):
            if recomputes and is_ahead:
                raise ValueError(f"kv_load_failure_policy='recompute' needs {option}, or take 'fail'")

    def _check_stages(self) -> None:
        """ValueError: an option with which a model cannot be split by layers."""
        model, parallel = self.model_config, self.parallel_config
        size = parallel.pipeline_parallel_size
        num_layers, asked = model.hf_config.num_hidden_layers, envs.layer_partition()
        if size > num_layers:
            raise ValueError(f"pipeline_parallel_size={size} exceeds the model's {num_layers} layers")
        if asked is not None and (len(asked) != size or sum(asked) != num_layers):
            raise ValueError(
                f"VLLM_PP_LAYER_PARTITION must have pipeline_parallel_size={size} numbers that add up to the model's "
                f"{num_layers} layers, got {','.join(map(str, asked))}"
            )
        for problem, option in (
            (self.device_config.device != "cpu", "device='cpu'"),
            (
                parallel.distributed_executor_backend == "external_launcher",
                "distributed_executor_backend='mp' or 'ray'",
            ),
            (model.attn_type == "encoder_only", "a model that generates, or one of these that pools"),
            (model.rounding != "vllm", "rounding='vllm'"),
        ):
            if problem:
                raise ValueError(
                    f"pipeline_parallel_size={size} needs {option}; or use tensor_parallel_size in its place"
                )

    def _check_rounding(self) -> None:
        """ValueError: an option with which nothing computes as transformers does."""
        model = self.model_config
        for problem, option in (
            (model.model_impl != "transformers", "model_impl='transformers'"),
            (model.runner_type == "pooling", "runner='generate'"),
            (model.quantization is not None, "an unquantised checkpoint and no quantization"),
            (self.kv_cache_dtype != model.dtype, "kv_cache_dtype='auto'"),
            (self.lora_config is not None, "enable_lora=False"),
            (self.device_config.device != "cpu", "device='cpu'"),
            (self.parallel_config.tensor_parallel_size > 1, "tensor_parallel_size=1"),
            (model.rounding == "autocast" and model.dtype != "float32", "dtype='float32'"),
            (envs.batch_invariant(), "VLLM_BATCH_INVARIANT=0, as PyTorch's sums may follow the batch"),
        ):
            if problem:
                raise ValueError(f"rounding={model.rounding!r} needs {option}")
