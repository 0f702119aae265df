"""What callers of `LLM` do with its engine beside generating: the calls of the table, and those of an engine in this
process alone."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Concatenate, ParamSpec, TypeVar

from vllm.sampling_params import SamplingParams
from vllm.v1.engine.calls import BlockingCalls, EngineCalls
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


class EngineControl(BlockingCalls):
    """The part of `LLM` that is about its engine. `llm_engine` is the engine."""

    llm_engine: LLMEngine

    @property
    def engine_calls(self) -> EngineCalls:
        """The engine's."""
        return self.llm_engine.engine_calls

    set_tokenizer = _of_engine(LLMEngine.set_tokenizer)
    collective_rpc = _of_engine(LLMEngine.collective_rpc)
    apply_model = _of_engine(LLMEngine.apply_model)
    get_metrics = _of_engine(LLMEngine.get_metrics)

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
