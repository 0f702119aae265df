"""What callers of `LLM` do with its engine beside generating: memory, weights, workers, metrics, profiles."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Concatenate, ParamSpec, TypeVar

from vllm.sampling_params import SamplingParams
from vllm.v1.engine.llm_engine import LLMEngine

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")


def _of_engine(
    method: Callable[Concatenate[LLMEngine, Arguments], Result],
) -> Callable[Concatenate[EngineControl, Arguments], Result]:
    """The engine's method as one of its LLM, with signature and docstring."""

    @wraps(method)
    def call(self: EngineControl, *args: Arguments.args, **kwargs: Arguments.kwargs) -> Result:
        result: Result = getattr(self.llm_engine, method.__name__)(*args, **kwargs)
        return result

    return call


class EngineControl:
    """The part of `LLM` that is about its engine. `llm_engine` is the engine."""

    llm_engine: LLMEngine

    get_tokenizer = _of_engine(LLMEngine.get_tokenizer)
    set_tokenizer = _of_engine(LLMEngine.set_tokenizer)
    reset_prefix_cache = _of_engine(LLMEngine.reset_prefix_cache)
    reset_mm_cache = _of_engine(LLMEngine.reset_mm_cache)
    collective_rpc = _of_engine(LLMEngine.collective_rpc)
    apply_model = _of_engine(LLMEngine.apply_model)
    sleep = _of_engine(LLMEngine.sleep)
    wake_up = _of_engine(LLMEngine.wake_up)
    is_sleeping = _of_engine(LLMEngine.is_sleeping)
    init_weight_transfer_engine = _of_engine(LLMEngine.init_weight_transfer_engine)
    start_weight_update = _of_engine(LLMEngine.start_weight_update)
    update_weights = _of_engine(LLMEngine.update_weights)
    finish_weight_update = _of_engine(LLMEngine.finish_weight_update)
    get_weight_version = _of_engine(LLMEngine.get_weight_version)
    get_metrics = _of_engine(LLMEngine.get_metrics)
    start_profile = _of_engine(LLMEngine.start_profile)
    stop_profile = _of_engine(LLMEngine.stop_profile)

    @property
    def supported_tasks(self) -> tuple[str, ...]:
        """What the model can be asked for: "generate", or the tasks of a pooling model, the default first."""
        return self.llm_engine.get_supported_tasks()

    def get_default_sampling_params(self) -> SamplingParams:
        """What `generate` uses without sampling_params: the values of the model's generation_config.json, unless
        generation_config="vllm"."""
        return SamplingParams(**self.llm_engine.model_config.default_sampling_params)

    def get_world_size(self, include_dp: bool = True) -> int:
        """Ranks of the engine. `include_dp`: an engine in the caller's process is one replica."""
        return self.llm_engine.vllm_config.parallel_config.tensor_parallel_size
