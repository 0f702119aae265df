"""What callers of `LLM` do with its engine beside generating: memory, weights, workers, metrics, profiles."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from vllm.sampling_params import SamplingParams
from vllm.v1.engine.llm_engine import LLMEngine

if TYPE_CHECKING:
    from torch import nn

    from vllm.v1.metrics.reader import Metric


class EngineControl:
    """The part of `LLM` that is about its engine. `llm_engine` is the engine."""

    llm_engine: LLMEngine

    def get_tokenizer(self) -> Any:
        """The model's tokenizer as transformers knows it.

        Raises:
            ValueError: skip_tokenizer_init left it out.
        """
        return self.llm_engine.get_tokenizer()

    def set_tokenizer(self, tokenizer: Any) -> None:
        """Use another tokenizer of the model's vocabulary, one of transformers', for the prompts that follow."""
        self.llm_engine.set_tokenizer(tokenizer)

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

    def reset_prefix_cache(self, reset_running_requests: bool = False, reset_connector: bool = False) -> bool:
        """Forget all cached prompt prefixes; see LLMEngine.reset_prefix_cache."""
        return self.llm_engine.reset_prefix_cache(reset_running_requests, reset_connector)

    def reset_mm_cache(self) -> None:
        """Nothing: inputs are text, and no other is cached."""

    def collective_rpc(
        self,
        method: str | Callable[..., Any],
        timeout: float | None = None,
        args: tuple = (),
        kwargs: dict[str, Any] | None = None,
    ) -> list[Any]:
        """Call a method of every worker (its name, or a function of the worker); one result a worker. See
        LLMEngine.collective_rpc."""
        return self.llm_engine.collective_rpc(method, timeout, args, kwargs)

    def apply_model(self, func: Callable[[nn.Module], Any]) -> list[Any]:
        """Call a function of the model on every worker; one result a worker. With several ranks it must be one of a
        module that can be imported."""
        return self.llm_engine.apply_model(func)

    def sleep(self, level: int = 1, mode: str = "abort") -> None:
        """Give memory back while the engine is idle: see LLMEngine.sleep. Whatever needs the model
        is a RuntimeError until `wake_up`."""
        self.llm_engine.sleep(level, mode)

    def wake_up(self, tags: list[str] | None = None) -> bool:
        """Undo `sleep`, or, with `tags`, what concerns "weights" or "kv_cache"; whether all of it is awake."""
        return self.llm_engine.wake_up(tags)

    def is_sleeping(self) -> bool:
        """Whether anything of the engine sleeps."""
        return self.llm_engine.is_sleeping()

    def get_metrics(self) -> list[Metric]:
        """See LLMEngine.get_metrics: `LLM(disable_log_stats=False)` keeps them."""
        return self.llm_engine.get_metrics()

    def start_profile(
        self,
        profile_prefix: str | None = None,
        *,
        delay_iterations: int | None = None,
        max_iterations: int | None = None,
        profiler_kwargs: dict[str, Any] | None = None,
    ) -> None:
        """See LLMEngine.start_profile."""
        self.llm_engine.start_profile(profile_prefix, delay_iterations, max_iterations, profiler_kwargs)

    def stop_profile(self) -> None:
        """End the recording; each worker writes a trace (for Perfetto, or chrome://tracing)."""
        self.llm_engine.stop_profile()
