"""The engine in the caller's process: add requests, step, take outputs."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

from vllm.config import VllmConfig
from vllm.config.usage import UsageContext
from vllm.exceptions import VLLMValidationError
from vllm.inputs.text_options import text_options
from vllm.lora.request import LoRARequest
from vllm.outputs import RequestOutput
from vllm.sampling_params import SamplingParams
from vllm.tokenizers.tokenizer import as_tokenizer
from vllm.tracing import continued, make_tracer
from vllm.utils.checks import check_neutral
from vllm.utils.loading_threads import meanwhile
from vllm.v1.engine.calls import BlockingCalls, EngineCalls
from vllm.v1.engine.core import EngineCore
from vllm.v1.engine.input_processor import InputProcessor, ProcessedPrompt, load_tokenizer, loaded, with_notes
from vllm.v1.engine.output_processor import OutputProcessor
from vllm.v1.engine.pooling_output_processor import PoolingOutputProcessor
from vllm.v1.executor.abstract import Executor
from vllm.v1.metrics.reader import Metric

if TYPE_CHECKING:
    from torch import nn

    from vllm.tokenizers.tokenizer import Tokenizer
    from vllm.v1.engine.offline_metrics import OfflineMetrics
    from vllm.v1.metrics.loggers import StatLoggers


class EngineArguments(Protocol):
    """An EngineArgs, as `from_engine_args` uses it."""

    data_parallel_size: int
    disable_log_stats: bool

    def create_engine_config(self, usage_context: Any = None) -> VllmConfig:
        """The configuration that they mean."""


class LLMEngine(BlockingCalls):
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
        """Load the model. Nothing is logged by itself, and no usage reported; another executor than the
        configuration's, and a core in another process, are refused.

        Args:
            log_stats: keep metrics, for get_metrics.
            stat_loggers: as AsyncLLM's; metrics are kept for them, too.
        """
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
            self._prepare(tokenizer.result(), log_stats, stat_loggers or ())
        except BaseException:
            self.engine_core.shutdown()
            raise

    def _prepare(self, tokenizer: Tokenizer | None, log_stats: bool, stat_loggers: Sequence[Any]) -> None:
        """Make the processors between callers and the core, and the callers' loggers."""
        self.tokenizer = tokenizer
        self.input_processor = InputProcessor(self.vllm_config, tokenizer)
        self._metrics: OfflineMetrics | None = None
        self.stat_loggers: StatLoggers | None = None
        is_pooling = self.model_config.runner_type == "pooling"
        if stat_loggers or (log_stats and not is_pooling):
            from vllm.v1.engine.offline_metrics import OfflineMetrics

            self._metrics = OfflineMetrics(self.vllm_config)
        counts = None if self._metrics is None else self._metrics.counts
        self.output_processor: Any = PoolingOutputProcessor(counts)
        if not is_pooling:
            self.output_processor = OutputProcessor(tokenizer, counts, self.tracer, self.model_config)
        if stat_loggers:
            from vllm.v1.metrics.loggers import StatLoggers

            assert counts is not None
            cache = replace(self.vllm_config.cache_config, num_gpu_blocks=self.engine_core.executor.num_blocks)
            self.stat_loggers = StatLoggers(replace(self.vllm_config, cache_config=cache), stat_loggers)
            counts.listen()

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
        engine_args: EngineArguments,
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
        session_id: str | None = None,
        prompt_text: str | None = None,
        kv_hints: Any = None,
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
            session_id, kv_hints: what the request is part of, and data about its cache, for who reads requests.
            prompt_text: the text of a prompt of ids, which outputs show.

        Raises:
            VLLMValidationError: a bad prompt, parameter or id; nothing is queued then.
            RuntimeError: the engine sleeps.
        """
        options = text_options(tokenization_kwargs)
        params = options.applied(params)
        (processed,) = self.input_processor.process_prompts([prompt], [params], options=options)
        checked = self.input_processor.process_params(params, len(processed.token_ids))
        (processed,) = self.with_adapters([processed], [lora_request])
        processed = with_notes(processed, prompt_text, session_id, kv_hints)
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
                children = self.output_processor.add_request(request_id, prompt, own, now, priority)
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
        if self.stat_loggers is not None:
            assert self._metrics is not None, "loggers have them kept"
            self.stat_loggers.record(0, self.engine_core.stats(), self._metrics.counts.take_iteration())
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
    def engine_calls(self) -> EngineCalls:
        """The calls that are no requests, over this engine."""
        return _CallsInProcess(self)

    @property
    def model_executor(self) -> Any:
        """The executor, which drives the workers; `model_executor.driver_worker.model_runner.model` is this process's
        model."""
        return self.engine_core.executor

    @model_executor.deleter
    def model_executor(self) -> None:
        """Ends the workers; the engine serves nothing any more."""
        self.engine_core.shutdown()

    def set_tokenizer(self, tokenizer: Any) -> None:
        """Use another tokenizer of the model's vocabulary, one of transformers', for the requests that follow."""
        self.tokenizer = as_tokenizer(tokenizer)
        self.input_processor.tokenizer = self.output_processor.tokenizer = self.tokenizer

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
        """Call a function of the model on every worker; one result a worker."""
        return self.collective_rpc(partial(_call_with_model, func))

    def get_metrics(self) -> list[Metric]:
        """The engine's metrics that docs/metrics.md lists, by Prometheus' names, as of now.

        Raises:
            ValueError: none are kept: disable_log_stats, LLM's default, or a pooling model.
        """
        if self._metrics is None:
            raise ValueError("no metrics are kept: give disable_log_stats=False (a pooling model keeps none)")
        return self._metrics.collect(self.engine_core, self.output_processor.num_unfinished_sequences)


class _CallsInProcess(EngineCalls):
    """The calls upon an LLMEngine, whose core is in this process."""

    def __init__(self, engine: LLMEngine) -> None:
        self.vllm_config, self.input_processor = engine.vllm_config, engine.input_processor
        self.stat_loggers = engine.stat_loggers
        self._engine = engine

    async def _call(self, method: str, *arguments: Any) -> list[Any]:
        return [self._engine.engine_core.call(method, *arguments)]

    async def _quieten(self, mode: str) -> None:
        while mode == "wait" and self._engine.has_unfinished_requests():
            self._engine.step()
        if mode == "abort":
            self._engine.abort_request(self._engine.output_processor.unfinished_request_ids)

    async def _load_adapter(self, request: LoRARequest) -> None:
        self._engine.engine_core.check_awake()
        self._engine.engine_core.call("add_lora", request)


def check_executor_class(config: VllmConfig, executor_class: Any) -> None:
    """
    Raises:
        VLLMValidationError: `executor_class` is neither None nor Executor, nor the class that `config` asks for.
    """
    if executor_class is None:
        return
    own = Executor.get_class(config)
    if executor_class not in (Executor, own):
        raise VLLMValidationError(
            f"executor_class must be {own.__name__}, which Executor.get_class gives for this configuration; "
            "distributed_executor_backend chooses another",
            "executor_class",
            executor_class,
        )


def _call_with_model(func: Callable[[nn.Module], Any], worker: Any) -> Any:
    return func(worker.get_model())
