"""The engine for an event loop: requests in, streams of outputs back, the cores in processes of their own."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

from typing_extensions import Self

from vllm.config import VllmConfig
from vllm.engine.arg_utils import EngineArgs
from vllm.exceptions import VLLMValidationError
from vllm.inputs.text_options import DEFAULT_TEXT_OPTIONS, TextOptions, text_options
from vllm.outputs import RequestOutput
from vllm.pooling_outputs import PoolingRequestOutput
from vllm.pooling_params import PoolingParams
from vllm.sampling_params import SamplingParams
from vllm.tokenizers.tokenizer import Tokenizer
from vllm.tracing import continued, make_tracer
from vllm.utils.checks import check_neutral
from vllm.v1.engine.adapters import distinct, once
from vllm.v1.engine.async_control import AsyncEngineControl, close_cores
from vllm.v1.engine.core_process.client import CoreClient
from vllm.v1.engine.core_process.start import CoreProcessHandle
from vllm.v1.engine.input_processor import InputProcessor, ProcessedPrompt, load_tokenizer
from vllm.v1.engine.output_processor import id_in_use_error
from vllm.v1.engine.replica import Replica
from vllm.v1.engine.replica_router import ReplicaRouter
from vllm.v1.engine.request_stream import RequestStream
from vllm.v1.engine.upstream_calls import check_executor_class
from vllm.v1.structured_output.matcher import read_early

MAX_COMPILE_SECONDS = 5
"""A form that takes longer is refused. Its compilation goes on, and is kept."""

_LONG_TEXT = 4096  # characters; more are tokenised in a thread, so that the loop goes on meanwhile


class AsyncEngine(AsyncEngineControl):
    """Generates for requests that come at any time. All methods but the constructor and `shutdown` belong to one event
    loop. When one of the `replicas` (data_parallel_size of them) dies, the engine is dead: it takes no further
    requests, but the other replicas finish theirs.
    """

    def __init__(
        self,
        vllm_config: VllmConfig,
        executor_class: type | None = None,
        log_stats: bool = False,
        usage_context: Any = None,
        mm_registry: Any = None,
        use_cached_outputs: bool = False,
        log_requests: bool = False,
        start_engine_loop: bool = True,
        stat_loggers: Sequence[Any] | None = None,
        aggregate_engine_logging: bool = False,
        client_addresses: Mapping[str, Any] | None = None,
        client_count: int = 1,
        client_index: int = 0,
        *,
        core_processes: Sequence[CoreProcessHandle] = (),
        meanwhile: Callable[[Tokenizer | None], None] | None = None,
    ) -> None:
        """Start the engine cores and wait until they are ready; EngineDeadError: one could not start, with the cause.
        The engine logs nothing by itself, so that the arguments about logs change nothing; loggers, executors other
        than the configuration's, and cores that run elsewhere, are refused.

        Args:
            executor_class: None, or what Executor.get_class gives.
            core_processes: data_parallel_size processes that `start_core` started; none = start them.
            meanwhile: called with the tokenizer while the cores load the model.
        """
        check_neutral("stat_loggers", stat_loggers, "read get_metrics, or the server's /metrics")
        check_neutral("client_addresses", client_addresses, "the engine starts its cores itself")
        check_executor_class(vllm_config, executor_class)
        self.vllm_config = config = vllm_config
        self.model_config = config.model_config
        cores = _start_cores(config, core_processes)
        try:
            self.tokenizer = load_tokenizer(self.model_config)
            read_early(self.model_config)
            if meanwhile is not None:
                meanwhile(self.tokenizer)
            for core in cores:
                core.wait_until_ready()
        except BaseException:
            close_cores(cores)
            raise
        self.input_processor = InputProcessor(config, self.tokenizer)
        self.tracer = make_tracer(config)
        self.replicas = [Replica(core, self.input_processor, self.tracer) for core in cores]
        self._router: ReplicaRouter | None = None
        if len(cores) > 1:
            cache, num_blocks = config.cache_config, [core.num_blocks for core in cores]
            self._router = ReplicaRouter(num_blocks, cache.block_size, cache.enable_prefix_caching)
        self._receivers: list[asyncio.Task[None]] = []
        self._adapters: dict[int, str] = {}

    @classmethod
    def from_vllm_config(
        cls,
        vllm_config: VllmConfig,
        start_engine_loop: bool = True,
        usage_context: Any = None,
        stat_loggers: Sequence[Any] | None = None,
        enable_log_requests: bool = False,
        aggregate_engine_logging: bool = False,
        disable_log_stats: bool = False,
        client_addresses: Mapping[str, Any] | None = None,
        client_count: int = 1,
        client_index: int = 0,
    ) -> Self:
        """An engine of a finished configuration; see the constructor."""
        return cls(vllm_config, stat_loggers=stat_loggers, client_addresses=client_addresses)

    @classmethod
    def from_engine_args(
        cls,
        engine_args: EngineArgs,
        start_engine_loop: bool = True,
        usage_context: Any = None,
        stat_loggers: Sequence[Any] | None = None,
    ) -> Self:
        """Build the configuration and the engine; see from_vllm_config. ValueError for bad arguments."""
        return cls.from_vllm_config(engine_args.create_engine_config(), start_engine_loop, usage_context, stat_loggers)

    async def generate(
        self,
        prompt: Any,
        sampling_params: SamplingParams,
        request_id: str,
        *,
        lora_request: Any = None,
        tokenization_kwargs: Mapping[str, Any] | None = None,
        trace_headers: Mapping[str, str] | None = None,
        priority: int = 0,
        data_parallel_rank: int | None = None,
    ) -> AsyncGenerator[RequestOutput, None]:
        """Yield the outputs of one prompt, by `sampling_params.output_kind`. Leaving the iteration early aborts the
        request. Arguments and errors as for `add_request`; EngineDeadError also when the engine dies meanwhile."""
        async with self._request(
            request_id,
            prompt,
            sampling_params,
            lora_request=lora_request,
            tokenization_kwargs=tokenization_kwargs,
            trace_headers=trace_headers,
            priority=priority,
            data_parallel_rank=data_parallel_rank,
        ) as stream:
            async for output in stream:
                yield output

    async def encode(
        self,
        prompt: Any,
        pooling_params: PoolingParams,
        request_id: str,
        lora_request: Any = None,
        trace_headers: Mapping[str, str] | None = None,
        priority: int = 0,
        tokenization_kwargs: Mapping[str, Any] | None = None,
        reasoning_ended: bool | None = None,
    ) -> AsyncGenerator[PoolingRequestOutput, None]:
        """Yield the one output of a prompt for a pooling model. Arguments and errors as for `add_request`."""
        async with self._request(
            request_id,
            prompt,
            pooling_params,
            lora_request=lora_request,
            tokenization_kwargs=tokenization_kwargs,
            trace_headers=trace_headers,
            priority=priority,
        ) as stream:
            async for output in stream:
                yield output

    @asynccontextmanager
    async def _request(self, request_id: str, *args: Any, **options: Any) -> AsyncIterator[Any]:
        """The stream of `add_request`; the request is aborted unless its last output is taken within."""
        stream = await self.add_request(request_id, *args, **options)
        try:
            yield stream
        finally:
            if not stream.is_finished:
                await asyncio.shield(self.abort(request_id))

    async def add_request(
        self,
        request_id: str,
        prompt: Any,
        params: SamplingParams | PoolingParams,
        *,
        lora_request: Any = None,
        tokenization_kwargs: Mapping[str, Any] | None = None,
        trace_headers: Mapping[str, str] | None = None,
        priority: int = 0,
        data_parallel_rank: int | None = None,
    ) -> RequestStream:
        """Check and queue one request.

        Args:
            request_id: a name that no unfinished request has.
            prompt: a string, a list of ids, a TextPrompt / TokensPrompt dict, or a ProcessedPrompt.
            params: what to do with it.
            lora_request: the adapter (a LoRARequest) that it is to run with; loaded if it is not yet.
            data_parallel_rank: None; the engine chooses the replica.
            tokenization_kwargs: as in LLM.generate.
            trace_headers: W3C's, of the trace that the request's span is to be part of.
            priority: lower runs earlier under the "priority" policy.

        Raises:
            VLLMValidationError: a bad prompt, parameter, id or adapter; nothing is queued then.
            EngineDeadError: the engine is dead.
        """
        self._check_alive()
        if data_parallel_rank is not None:
            message = "data_parallel_rank is not supported: the engine chooses the replica"
            raise VLLMValidationError(message, "data_parallel_rank", data_parallel_rank)
        self.input_processor.check_params(params)
        self.input_processor.check_request(request_id, params, priority)
        if getattr(params, "logits_processors", None):
            message = "logits_processors cannot be sent to the engine's process; load a custom logits processor instead"
            raise VLLMValidationError(message, "logits_processors")
        if isinstance(prompt, ProcessedPrompt):
            processed = prompt
        else:
            options = text_options(tokenization_kwargs)
            params = options.applied(params)
            (processed,) = await self.process_prompts([prompt], [params], options=options)
        await self.compile_grammar(params)
        checked = self.input_processor.process_params(params, len(processed.token_ids))
        (processed,) = await self.with_adapters([processed], [lora_request])
        with continued(self.tracer, trace_headers):
            return await self.add_checked(request_id, processed, checked, priority)

    async def with_adapters(self, prompts: Sequence[ProcessedPrompt], adapters: Sequence[Any]) -> list[ProcessedPrompt]:
        """See LLMEngine.with_adapters."""
        made = self.input_processor.with_adapters(prompts, adapters)
        for request in distinct(made):
            if request.load_inplace or self._adapters.get(request.lora_int_id) != request.lora_path:
                await self.add_lora(request)
        return once(made)

    async def process_prompts(
        self, prompts: Sequence[Any], params: Sequence[Any], *, options: TextOptions = DEFAULT_TEXT_OPTIONS
    ) -> list[ProcessedPrompt]:
        """InputProcessor.process_prompts, for long texts in a thread."""
        process = self.input_processor.process_prompts
        if sum(len(_text_of(prompt)) for prompt in prompts) > _LONG_TEXT:
            return await asyncio.to_thread(process, prompts, params, options=options)
        return process(prompts, params, options=options)

    async def compile_grammar(self, params: SamplingParams | PoolingParams) -> None:
        """Compile the form that `params` ask for in a thread, so that the input processor finds it ready; errors as its
        compile_grammar."""
        form = getattr(params, "structured_outputs", None)
        if form is None:
            return
        await asyncio.to_thread(self.input_processor.read_grammars)
        try:
            await asyncio.wait_for(asyncio.to_thread(self.input_processor.compile_grammar, form), MAX_COMPILE_SECONDS)
        except asyncio.TimeoutError:
            message = f"structured_outputs.{form.kind[0]} did not compile within {MAX_COMPILE_SECONDS} s"
            raise VLLMValidationError(message, "structured_outputs") from None

    async def add_checked(
        self,
        request_id: str,
        processed: ProcessedPrompt,
        checked: SamplingParams,
        priority: int = 0,
        changed: asyncio.Event | None = None,
    ) -> RequestStream:
        """Queue a request from `process_prompts` and `input_processor.process_params`; errors: the id is in use, the
        engine is dead. `changed`: see RequestStream."""
        self._check_alive()
        await self._wait_while_paused()
        router = self._router
        if router is None:
            return self.replicas[0].add(request_id, processed, checked, priority, changed)
        if request_id in router:
            raise id_in_use_error(request_id, request_id)
        num_sequences, max_tokens = (
            (1, 0) if isinstance(checked, PoolingParams) else (checked.num_distinct, checked.max_tokens)
        )
        assert max_tokens is not None, "the input processor sets max_tokens"
        index = router.route(
            request_id, processed.token_ids, processed.cache_salt, num_sequences, max_tokens, processed.adapter_id
        )
        try:
            return self.replicas[index].add(request_id, processed, checked, priority, changed)
        except BaseException:
            router.end([request_id])
            raise


def _start_cores(config: VllmConfig, processes: Sequence[CoreProcessHandle]) -> list[CoreClient]:
    """A core for each replica, not ready yet."""
    parallel = config.parallel_config
    num_replicas = parallel.data_parallel_size
    cores = []
    for rank, process in enumerate(processes or (None,) * num_replicas):
        own = replace(config, parallel_config=replace(parallel, data_parallel_rank=rank))
        name = "the engine core" if num_replicas == 1 else f"engine core {rank}"
        cores.append(CoreClient(own, process, name))
    return cores


def _text_of(prompt: Any) -> str:
    """The prompt's text if it is to be tokenised, else empty."""
    text = prompt.get("prompt") if isinstance(prompt, dict) and "prompt_token_ids" not in prompt else prompt
    return text if isinstance(text, str) else ""
