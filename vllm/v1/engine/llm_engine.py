"""The engine in the caller's process: add requests, step, take outputs."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from vllm.config import ModelConfig, VllmConfig
from vllm.engine.arg_utils import EngineArgs
from vllm.engine.usage import UsageContext
from vllm.engine.weight_transfer import trainer_of, weights_of_update
from vllm.inputs.text_options import text_options
from vllm.lora.request import LoRARequest, given_lora_request
from vllm.outputs import RequestOutput
from vllm.sampling_params import SamplingParams
from vllm.tokenizers.tokenizer import as_tokenizer
from vllm.tracing import continued, make_tracer
from vllm.utils.checks import check_neutral
from vllm.utils.loading_threads import meanwhile
from vllm.v1.engine.adapters import loaded
from vllm.v1.engine.core import EngineCore
from vllm.v1.engine.input_processor import InputProcessor, ProcessedPrompt, load_tokenizer
from vllm.v1.engine.output_processor import OutputProcessor
from vllm.v1.engine.pooling_output_processor import PoolingOutputProcessor
from vllm.v1.engine.upstream_calls import (
    check_executor_class,
    check_pause_mode,
    check_profile_limits,
)
from vllm.v1.executor.select import Executor
from vllm.v1.metrics.reader import Metric

if TYPE_CHECKING:
    from torch import nn

    from vllm.tokenizers.tokenizer import Tokenizer
    from vllm.v1.engine.offline_metrics import OfflineMetrics


class LLMEngine:
    """Input processor, engine core and output processor in one process."""

    def __init__(
        self,
        vllm_config: VllmConfig,
        executor_class: type | None = None,
        log_stats: bool = False,
        aggregate_engine_logging: bool = False,
        usage_context: Any = None,
        stat_loggers: Sequence[Any] | None = None,
        mm_registry: Any = None,
        use_cached_outputs: bool = False,
        multiprocess_mode: bool = False,
        *,
        use_tqdm: bool = False,
    ) -> None:
        """Load the model. Nothing is logged by itself, and no usage reported; loggers, another executor than the
        configuration's, and a core in another process, are refused. `log_stats`: keep metrics, for get_metrics."""
        check_neutral("stat_loggers", stat_loggers, "read get_metrics, or the server's /metrics")
        check_neutral("multiprocess_mode", multiprocess_mode, "AsyncLLM runs the core in its own process")
        check_executor_class(vllm_config, executor_class)
        self.vllm_config = config = vllm_config
        self.model_config = config.model_config
        self.tracer = make_tracer(config)
        load = partial(load_tokenizer, self.model_config)
        model = self.model_config.path or self.model_config.model
        # One that was named may not be there: that is said before the model is loaded.
        named = load() if self.model_config.tokenizer != model else None
        with meanwhile(load if named is None else lambda: named) as tokenizer:
            self.engine_core: Any = EngineCore(config, use_tqdm)
        try:
            self._prepare(tokenizer.result(), log_stats)
        except BaseException:
            self.engine_core.shutdown()
            raise

    def _prepare(self, tokenizer: Tokenizer | None, log_stats: bool) -> None:
        """Make the processors between callers and the core."""
        self.tokenizer = tokenizer
        self.input_processor = InputProcessor(self.vllm_config, tokenizer)
        self._metrics: OfflineMetrics | None = None
        self.output_processor: Any = PoolingOutputProcessor()
        if self.model_config.runner_type != "pooling":
            if log_stats:
                from vllm.v1.engine.offline_metrics import OfflineMetrics

                self._metrics = OfflineMetrics(self.vllm_config)
            counts = None if self._metrics is None else self._metrics.counts
            self.output_processor = OutputProcessor(tokenizer, counts, self.tracer, self.model_config)

    @classmethod
    def from_vllm_config(
        cls,
        vllm_config: VllmConfig,
        usage_context: Any = None,
        stat_loggers: Sequence[Any] | None = None,
        disable_log_stats: bool = False,
    ) -> LLMEngine:
        """An engine of a finished configuration."""
        return cls(vllm_config, log_stats=not disable_log_stats, stat_loggers=stat_loggers)

    @classmethod
    def from_engine_args(
        cls,
        engine_args: EngineArgs,
        usage_context: Any = None,
        stat_loggers: Sequence[Any] | None = None,
        enable_multiprocessing: bool = False,
        use_tqdm: bool = False,
    ) -> LLMEngine:
        """Build the configuration and the engine; ValueError: an argument that cannot be honoured. `usage_context` says
        who asks, and so how large steps are by default; nothing is reported."""
        check_neutral("enable_multiprocessing", enable_multiprocessing, "AsyncLLM runs the core in its own process")
        if engine_args.data_parallel_size != 1:
            raise ValueError(
                f"data_parallel_size must be 1 for an engine in the caller's process, got "
                f"{engine_args.data_parallel_size}; replicas work behind a server (vllm serve --data-parallel-size N) "
                "or in a job (vllm score --backend ray --replicas N)"
            )
        config = engine_args.create_engine_config(usage_context or UsageContext.LLM_CLASS)
        log_stats = not engine_args.disable_log_stats
        return cls(config, log_stats=log_stats, stat_loggers=stat_loggers, use_tqdm=use_tqdm)

    def add_request(
        self,
        request_id: str,
        prompt: Any,
        params: SamplingParams,
        arrival_time: float | None = None,
        lora_request: Any = None,
        tokenization_kwargs: Mapping[str, Any] | None = None,
        trace_headers: Mapping[str, str] | None = None,
        priority: int = 0,
    ) -> str:
        """Queue one request; returns its id.

        Args:
            request_id: a name that no unfinished request has.
            prompt: a string, a list of ids, or a TextPrompt / TokensPrompt dict.
            arrival_time: seconds on the monotonic clock; None = now.
            lora_request: the adapter that it is to run with.
            tokenization_kwargs: as in LLM.generate.
            trace_headers: W3C's, of the trace that the request's span is to be part of.
            priority: lower runs earlier under the "priority" policy.

        Raises:
            VLLMValidationError: a bad prompt, parameter or id; nothing is queued then.
            RuntimeError: the engine sleeps.
        """
        options = text_options(tokenization_kwargs)
        params = options.applied(params)
        (processed,) = self.input_processor.process_prompts([prompt], [params], options=options)
        checked = self.input_processor.process_params(params, len(processed.token_ids))
        (processed,) = self.with_adapters([processed], [lora_request])
        with continued(self.tracer, trace_headers):
            self.add_processed([request_id], [processed], [checked], arrival_time, [priority])
        return request_id

    def with_adapters(self, prompts: Sequence[ProcessedPrompt], adapters: Sequence[Any]) -> list[ProcessedPrompt]:
        """The prompts with an adapter (a LoRARequest) each, or None; those that are new are loaded.

        Raises:
            VLLMValidationError: adapters are not enabled, or one's files, or its id; nothing has changed then.
        """
        made = self.input_processor.with_adapters(prompts, adapters)
        return loaded(made, self.add_lora)

    def add_processed(
        self,
        request_ids: Sequence[str],
        prompts: Sequence[ProcessedPrompt],
        params: Sequence[SamplingParams],
        arrival_time: float | None = None,
        priorities: Sequence[int] | None = None,
    ) -> None:
        """Queue requests that went through the input processor; all of them, or, on an error, none. RuntimeError: the
        engine sleeps."""
        self.engine_core.check_awake()
        now = time.monotonic() if arrival_time is None else arrival_time
        priorities = priorities or [0] * len(prompts)
        added: list[str] = []
        try:
            for request_id, prompt, own, priority in zip(request_ids, prompts, params, priorities, strict=True):
                self.input_processor.check_request(request_id, own, priority)
                children = self.output_processor.add_request(
                    request_id,
                    prompt.text,
                    prompt.token_ids,
                    own,
                    now,
                    prompt.cache_salt,
                    priority,
                    prompt.lora_request,
                    prompt.content_of,
                )
                added.append(request_id)
                for request in self.input_processor.core_requests(children, prompt, now, priority):
                    self.engine_core.add_request(request)
        except BaseException:
            self.abort_request(added)
            raise

    def step(self) -> list[RequestOutput]:
        """Run one step; returns the outputs due by output_kind. After an error only the step's requests are gone.
        RuntimeError: there are requests, but the engine sleeps; they stay."""
        try:
            outputs = self.engine_core.step()
        except BaseException:
            self.output_processor.forget_missing(self.engine_core.has_request)
            raise
        self.output_processor.weight_version = self.engine_core.weight_version
        processed = self.output_processor.process_outputs(outputs)
        if processed.requests_to_abort:
            self.engine_core.abort_requests(processed.requests_to_abort)
        for request in self.input_processor.further_requests(processed.to_queue):
            self.engine_core.add_request(request)
        return processed.request_outputs

    def abort_request(self, request_ids: Iterable[str], internal: bool = False) -> None:
        """Drop requests by the ids they were added with; unknown ids are ignored. `internal` changes nothing: a request
        has one id."""
        self.engine_core.abort_requests(self.output_processor.abort_requests(request_ids))

    def has_unfinished_requests(self) -> bool:
        """Whether any request is waiting or running."""
        return self.output_processor.has_unfinished_requests()

    def get_num_unfinished_requests(self) -> int:
        """Requests not finished yet, by the ids they were added with."""
        return self.output_processor.num_unfinished_requests

    @property
    def model_executor(self) -> Executor:
        """What drives the workers; `model_executor.driver_worker.model_runner.model` is this process's model."""
        return self.engine_core.executor

    def get_tokenizer(self) -> Any:
        """The model's tokenizer as transformers has it.

        Raises:
            ValueError: skip_tokenizer_init left it out.
        """
        return self.input_processor.hf_tokenizer()

    def set_tokenizer(self, tokenizer: Any) -> None:
        """Use another tokenizer of the model's vocabulary, one of transformers', for the requests that follow."""
        self.tokenizer = as_tokenizer(tokenizer)
        self.input_processor.tokenizer = self.output_processor.tokenizer = self.tokenizer

    def get_model_config(self) -> ModelConfig:
        """`model_config`."""
        return self.model_config

    def get_supported_tasks(self) -> tuple[str, ...]:
        """See ModelConfig.supported_tasks."""
        return self.model_config.supported_tasks

    def sleep(self, level: int = 1, mode: str = "abort") -> None:
        """Free the KV cache, and the device's memory of the weights (on a CPU at level 2 only). Whatever needs the
        model is a RuntimeError until `wake_up`.

        Args:
            level: 1 keeps the weights (of a GPU in the host's memory), 2 frees them.
            mode: "abort" ends unfinished requests; "keep" lets them begin anew after `wake_up`; "wait" runs them to
                their ends, and their outputs are lost.
        """
        check_pause_mode(mode)
        while mode == "wait" and self.has_unfinished_requests():
            self.step()
        if mode == "abort":
            self.abort_request(self.output_processor.unfinished_request_ids)
        self.engine_core.sleep(level)

    def wake_up(self, tags: list[str] | None = None) -> bool:
        """Undo `sleep`, or, with `tags`, what concerns "weights" or "kv_cache"; whether all of it is awake."""
        self.engine_core.wake_up(tags)
        return not self.engine_core.is_sleeping()

    def is_sleeping(self) -> bool:
        """Whether any part of the engine sleeps."""
        return self.engine_core.is_sleeping()

    def reset_prefix_cache(self, reset_running_requests: bool = False, reset_connector: bool = False) -> bool:
        """Forget all cached blocks; False (and nothing done) while requests run, unless these are to begin anew.
        There is no connector to reset."""
        return self.engine_core.reset_prefix_cache(reset_running_requests)

    def collective_rpc(
        self,
        method: str | Callable[..., Any],
        timeout: float | None = None,
        args: tuple = (),
        kwargs: dict[str, Any] | None = None,
    ) -> list[Any]:
        """Call a method of every worker by name, or a function with the worker as its first argument; one result a
        worker. `timeout` has no effect: VLLM_WORKER_TIMEOUT_S bounds the wait for other ranks."""
        return self.engine_core.collective_rpc(method, args, kwargs)

    def apply_model(self, func: Callable[[nn.Module], Any]) -> list[Any]:
        """Call a function of the model on every worker; one result a worker. With several ranks it must be one of a
        module that can be imported."""
        return self.collective_rpc(partial(_call_with_model, func))

    def init_weight_transfer_engine(self, request: Any = None) -> None:
        """Let every worker meet the trainer that the request's `init_info` names; nothing where it is empty.
        VLLMValidationError: see `trainer_of`."""
        if (trainer := trainer_of(request)) is not None:
            self.collective_rpc("meet_trainer", kwargs=trainer)

    def start_weight_update(self) -> None:
        """Keep what `update_weights` brings, until `finish_weight_update` takes all of it at once."""
        self.collective_rpc("start_weight_update")

    def update_weights(self, request: Any) -> None:
        """New weights by their checkpoint names; see `weights_of_update` for the request. ValueError: one does not fit;
        none is taken."""
        method, arguments = weights_of_update(request)
        self.collective_rpc(method, args=arguments)

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        """Take what has come since start_weight_update, all or, on a ValueError, none. Outputs that follow are of
        `weight_version`; None: of the number of updates so far."""
        self.collective_rpc("finish_weight_update", args=(weight_version,))

    def get_weight_version(self) -> int | str:
        """Of the weights that the next outputs are of, as in CompletionOutput.weight_versions."""
        return self.engine_core.get_weight_version()

    def get_metrics(self) -> list[Metric]:
        """What docs/metrics.md lists of the engine, by Prometheus' names, as of now.

        Raises:
            ValueError: none are kept: disable_log_stats, LLM's default, or a pooling model.
        """
        if self._metrics is None:
            raise ValueError("no metrics are kept: give disable_log_stats=False (a pooling model keeps none)")
        return self._metrics.collect(self.engine_core, self.output_processor.num_unfinished_sequences)

    def reset_mm_cache(self) -> None:
        """Nothing: inputs are text, and no other is cached."""

    def do_log_stats(self) -> None:
        """Nothing: the engine logs no statistics by itself."""

    def start_profile(
        self,
        profile_prefix: str | None = None,
        delay_iterations: int | None = None,
        max_iterations: int | None = None,
        profiler_kwargs: dict[str, Any] | None = None,
    ) -> None:
        """Begin to record operators and kernels on every worker, until stop_profile.

        Args:
            profile_prefix: of the traces' file names.

        Raises:
            ValueError: no folder was named: see `profiler_config`.
            VLLMValidationError: another argument is not None.
        """
        check_profile_limits(delay_iterations, max_iterations, profiler_kwargs)
        self.collective_rpc("profile", args=(True, profile_prefix))

    def stop_profile(self) -> None:
        """End the recording; each worker writes a trace (for Perfetto, or chrome://tracing)."""
        self.collective_rpc("profile", args=(False,))

    def add_lora(self, lora_request: LoRARequest) -> bool:
        """Load an adapter, unless it is loaded; with its `load_inplace` again.

        Raises:
            VLLMValidationError: adapters are not enabled, or one's files, or its id; nothing has changed then.
        """
        request = given_lora_request(lora_request, self.input_processor.has_adapters)
        self.engine_core.check_awake()
        return self.engine_core.add_lora(request)

    def remove_lora(self, lora_id: int) -> bool:
        """Unload an adapter, now or once the running requests of it end; False: it is not loaded."""
        return self.engine_core.remove_lora(lora_id)

    def list_loras(self) -> set[int]:
        """The ids of the adapters that are loaded."""
        return self.engine_core.list_loras()

    def pin_lora(self, lora_id: int) -> bool:
        """Keep an adapter loaded whatever others come.

        Raises:
            VLLMValidationError: it is not loaded, or max_cpu_loras of them are pinned.
        """
        return self.engine_core.pin_lora(lora_id)


def _call_with_model(func: Callable[[nn.Module], Any], worker: Any) -> Any:
    return func(worker.get_model())
