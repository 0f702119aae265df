"""Attributes that classes of the engine have for upstream's callers alone; the finder adds them at a module's import.

Upstream's engine holds a core, which holds an executor, which holds workers, which hold a worker each; here several of
these are one object, which is each of its parts to a caller that goes down that path.
"""

from __future__ import annotations

import asyncio
import time
from types import ModuleType
from typing import Any, NoReturn

_ITSELF = property(lambda self: self, doc="The object itself.")
_EXECUTOR = property(lambda self: self.executor, doc="`executor`.")
_DRAIN_POLL_SECONDS = 0.01
_ENTRIES = {"start_indices", "end_indices", "token_ids", "logprobs", "ranks", "decoded_tokens"}


def _save_sharded_state(self: Any, path: str, pattern: str | None = None, max_size: int | None = None) -> None:
    """
    Raises:
        NotImplementedError: always.
    """
    from vllm.upstream.utils.unserved import refuse

    refuse("save_sharded_state", "workers read only their share of a checkpoint; keep the checkpoint as it is")


def _renderer(self: Any) -> NoReturn:
    """
    Raises:
        AbsentAttributeError: always.
    """
    from vllm.upstream.table import table
    from vllm.upstream.utils.unserved import refuse_attribute

    refuse_attribute(f"{type(self).__name__}.renderer", table().names["vllm.entrypoints.llm"]["LLM.renderer"].why)


def _flat_or_editable(cls: type, *args: Any, **fields: Any) -> Any:
    """A result of the engine; for a caller (no arguments, or lists of entries) EditableLogprobs, to be filled."""
    from vllm.upstream.editable_logprobs import EditableLogprobs

    if cls.__name__ == "FlatLogprobs" and not args and fields.keys() <= _ENTRIES:
        return EditableLogprobs(**fields)
    return object.__new__(cls)


def _part(name: str) -> Any:
    """A function of `engine_parts`, which is imported when it is called."""

    def call(self: Any, *args: Any, **fields: Any) -> Any:
        from vllm.upstream import engine_parts

        return getattr(engine_parts, name)(self, *args, **fields)

    return call


def _load_config(self: Any) -> Any:
    from vllm.upstream.config.load import LoadConfig

    return LoadConfig(load_format=self.model_config.load_format)


def _observability_config(self: Any) -> Any:
    from vllm.upstream.config.observability import ObservabilityConfig

    return ObservabilityConfig(otlp_traces_endpoint=self.otlp_traces_endpoint)


def _compilation_config(self: Any) -> Any:
    from vllm.upstream.config.compilation import CompilationConfig

    return CompilationConfig()


def _has_kv_role(role: str) -> Any:
    return lambda self: self.kv_connector is not None and self.kv_role in (role, "kv_both")


def _adopt(model_class: Any) -> Any:
    """A class that runs a model that was written for upstream; other classes as they are."""
    if model_class.__module__.startswith("vllm.models."):
        return model_class
    from vllm.upstream.outside.model import adopted

    return adopted(model_class)


async def _wait_for_requests_to_drain(self: Any, drain_timeout: float = 300) -> None:
    """Until no request is unfinished.

    Args:
        drain_timeout: seconds.

    Raises:
        EngineDeadError: the engine is dead.
        TimeoutError: some are after that time.
    """
    deadline = time.monotonic() + drain_timeout
    while count := self.num_unfinished_requests:
        await self.check_health()
        if time.monotonic() > deadline:
            raise TimeoutError(f"{count} requests were not finished after {drain_timeout} s")
        await asyncio.sleep(_DRAIN_POLL_SECONDS)


async def _get_vllm_config(self: Any) -> Any:
    """`vllm_config`."""
    return self.vllm_config


async def _is_tracing_enabled(self: Any) -> bool:
    """Whether requests are traced: otlp_traces_endpoint was given."""
    return self.tracer is not None


def _get_num_unfinished_requests(self: Any) -> int:
    """`num_unfinished_requests`."""
    return self.num_unfinished_requests


# module -> class, or "" for the module itself -> attribute -> value
ROWS: dict[str, dict[str, dict[str, Any]]] = {
    "vllm.config.parallel": {
        "ParallelConfig": {
            "data_parallel_size_local": property(lambda self: self.data_parallel_size),
            "enable_expert_parallel": False,
            "local_rank": property(_part("rank")),
            "rank": property(_part("rank")),
            "world_size_across_dp": property(lambda self: self.world_size * self.data_parallel_size),
        }
    },
    "vllm.config.device": {"DeviceConfig": {"device_type": property(lambda self: self.device)}},
    "vllm.config.vllm": {
        "VllmConfig": {
            "additional_config": property(lambda self: {}),
            "compilation_config": property(_compilation_config),
            "ec_transfer_config": None,
            "instance_id": "",
            "num_speculative_tokens": property(
                lambda self: 0 if self.speculative_config is None else self.speculative_config.num_speculative_tokens
            ),
            "load_config": property(_load_config),
            "observability_config": property(_observability_config),
            "quant_config": None,
            "reasoning_config": None,
            "use_v2_model_runner": True,
        }
    },
    "vllm.logprobs.flat": {"FlatLogprobs": {"__new__": staticmethod(_flat_or_editable)}},
    "vllm.v1.engine.core": {
        "EngineCore": {"engine_core": _ITSELF, "model_executor": _EXECUTOR, "save_sharded_state": _save_sharded_state}
    },
    "vllm.models.registry": {
        "": {"adopt": _adopt},
        "_ModelRegistry": {
            "resolve_model_cls": _part("resolve_model_cls"),
            "is_text_generation_model": _part("is_text_generation_model"),
            "is_pooling_model": _part("is_pooling_model"),
            "is_multimodal_model": _part("is_multimodal_model"),
        },
    },
    "vllm.config.kv_transfer": {
        "KVTransferConfig": {
            "is_kv_transfer_instance": property(lambda self: self.kv_connector is not None),
            "is_kv_producer": property(
                lambda self: self.kv_role in ("kv_producer", "kv_both") and bool(self.kv_connector)
            ),
            "is_kv_consumer": property(
                lambda self: self.kv_role in ("kv_consumer", "kv_both") and bool(self.kv_connector)
            ),
            "get_from_extra_config": lambda self, key, default: self.kv_connector_extra_config.get(key, default),
        }
    },
    "vllm.distributed.communicator": {
        "Communicator": {
            "cpu_group": property(lambda self: self.device_group),
            "is_first_rank": property(lambda self: self.rank == 0),
            "is_last_rank": property(lambda self: self.rank == self.world_size - 1),
            "rank_in_group": property(lambda self: self.rank),
            "ranks": property(lambda self: list(range(self.world_size))),
        }
    },
    "vllm.config.model": {
        "ModelConfig": {
            "architectures": property(_part("architectures")),
            "hf_text_config": property(lambda self: self.hf_config),
            "is_encoder_decoder": False,
            "is_moe": property(_part("is_moe")),
            "is_multimodal_model": property(lambda self: self.reads_images),
            "uses_mrope": property(_part("uses_mrope")),
            "get_vocab_size": lambda self: self.hf_config.vocab_size,
            "get_hidden_size": lambda self: self.hf_config.hidden_size,
            "get_num_layers": _part("get_num_layers"),
            "get_num_attention_heads": _part("get_num_attention_heads"),
            "get_head_size": _part("get_head_size"),
            "get_num_kv_heads": _part("get_num_kv_heads"),
            "get_total_num_kv_heads": _part("get_total_num_kv_heads"),
            "use_mla": property(_part("use_mla")),
            "get_sliding_window": _part("get_sliding_window"),
            "is_quantized": property(lambda self: self.quantization is not None),
            "try_get_generation_config": _part("read_generation_config"),
            "get_diff_sampling_param": _part("get_diff_sampling_param"),
        }
    },
    "vllm.entrypoints.async_llm": {
        "AsyncLLM": {
            "engine_core": property(_part("CoreClients")),
            "get_num_unfinished_requests": _get_num_unfinished_requests,
            "get_vllm_config": _get_vllm_config,
            "is_running": property(lambda self: not self.errored, doc="Whether the engine takes requests."),
            "is_stopped": property(lambda self: self.errored, doc="Whether the engine is dead."),
            "is_tracing_enabled": _is_tracing_enabled,
            "observability_config": property(lambda self: self.vllm_config.observability_config),
            "output_processor": _ITSELF,
            "renderer": property(_renderer),
            "request_states": property(lambda self: dict.fromkeys(self.unfinished_request_ids)),
            "wait_for_requests_to_drain": _wait_for_requests_to_drain,
        }
    },
    "vllm.entrypoints.llm": {
        "LLM": {
            "_preprocess_cmpl": _part("preprocess_completions"),
            "_preprocess_cmpl_one": _part("preprocess_completion"),
            "default_sampling_params": property(lambda self: dict(self.model_config.default_sampling_params)),
            "engine_class": property(lambda self: type(self.llm_engine)),
            "input_processor": property(lambda self: self.llm_engine.input_processor),
            "runner_type": property(lambda self: self.model_config.runner_type),
            "renderer": property(_renderer),
        }
    },
    "vllm.v1.executor.worker": {"Worker": {"worker": _ITSELF}},
}


def add(module: ModuleType) -> None:
    """Give the module and its classes what ROWS says."""
    for name, attributes in ROWS[module.__name__].items():
        for attribute, value in attributes.items():
            setattr(getattr(module, name) if name else module, attribute, value)
