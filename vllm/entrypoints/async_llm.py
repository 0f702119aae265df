"""The engine for an event loop: requests in, streams of outputs back, the cores in processes of their own."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import partial
from typing import Any

from typing_extensions import Self

from vllm.config import VllmConfig
from vllm.decisions.params import DecisionParams
from vllm.decisions.plan import DecisionPlan
from vllm.decisions.types import Decision
from vllm.engine.arg_utils import EngineArgs
from vllm.exceptions import EngineDeadError, GenerationError, VLLMValidationError
from vllm.inputs.images import DATA
from vllm.inputs.text_options import DEFAULT_TEXT_OPTIONS, TextOptions, text_options
from vllm.logger import init_logger
from vllm.lora.request import LoRARequest
from vllm.outputs import RequestOutput
from vllm.pooling_outputs import PoolingRequestOutput
from vllm.pooling_params import PoolingParams
from vllm.sampling_params import SamplingParams
from vllm.tokenizers.tokenizer import Tokenizer
from vllm.tracing import continued, make_tracer
from vllm.utils.checks import check_neutral
from vllm.utils.device import usable_cores
from vllm.utils.function_pickle import pickled
from vllm.utils.ray_utils import current_placement_group
from vllm.v1.engine.calls import EngineCalls, check_pause_mode, routed
from vllm.v1.engine.core_process.client import CoreClient
from vllm.v1.engine.core_process.start import CoreProcessHandle, end_core, start_core, with_replicas
from vllm.v1.engine.input_processor import InputProcessor, ProcessedPrompt, distinct, load_tokenizer, once, with_notes
from vllm.v1.engine.llm_engine import check_executor_class
from vllm.v1.engine.output_processor import id_in_use_error
from vllm.v1.engine.replica import Replica, RequestStream
from vllm.v1.engine.replica_router import ReplicaRouter
from vllm.v1.messages import EngineCoreOutput
from vllm.v1.metrics.loggers import StatLoggers
from vllm.v1.structured_output.matcher import read_early

logger = init_logger(__name__)

_PAUSE_POLL_SECONDS = 0.01

MAX_COMPILE_SECONDS = 5
"""A form that takes longer is refused. Its compilation goes on, and is kept."""

_LARGE = {"prompt_embeds", DATA}
_LONG_TEXT = 4096  # characters; more are tokenised in a thread, so that the loop goes on meanwhile


class AsyncLLM(EngineCalls):
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
        core_process: CoreProcessHandle | None = None,
        meanwhile: Callable[[Tokenizer | None], None] | None = None,
    ) -> None:
        """Start the engine cores and wait until they are ready; EngineDeadError: one could not start, with the cause.
        The engine logs nothing by itself: the arguments about logs are kept for callers that read them. Executors other
        than the configuration's, and cores that run elsewhere, are refused.

        Args:
            executor_class: None, or what Executor.get_class gives.
            stat_loggers: callables (vllm_config, engine_index), or subclasses of AggregateStatLoggerBase
                (vllm.v1.metrics.loggers), which make what is told of each step, once the engine is ready.
            core_process: the first replica's, from `start_core`; None = start it.
            meanwhile: called with the tokenizer while the cores load the model.
        """
        check_neutral("client_addresses", client_addresses, "the engine starts its cores itself")
        self.log_stats, self.log_requests = log_stats, log_requests
        check_executor_class(vllm_config, executor_class)
        self.vllm_config = config = vllm_config
        self.model_config = config.model_config
        cores = _start_cores(config, core_process)
        try:
            tokenizer = load_tokenizer(self.model_config)
            read_early(self.model_config)
            if meanwhile is not None:
                meanwhile(tokenizer)
            # A picture processor that lacks something says so before the weights are there.
            self.input_processor = InputProcessor(config, tokenizer)
            for core in cores:
                core.wait_until_ready()
            cache = replace(config.cache_config, num_gpu_blocks=min(core.num_blocks for core in cores))
            self.vllm_config = config = replace(config, cache_config=cache)
            self.stat_loggers = StatLoggers(config, stat_loggers, len(cores)) if stat_loggers else None
        except BaseException:
            _close_cores(cores)
            raise
        self.tracer = make_tracer(config)
        self.replicas = [Replica(core, self.input_processor, self.tracer) for core in cores]
        if self.stat_loggers is not None:
            for index, replica in enumerate(self.replicas):
                replica.listen(partial(self.stat_loggers.record, index))
        self._router: ReplicaRouter | None = None
        if len(cores) > 1:
            cache, num_blocks = config.cache_config, [core.num_blocks for core in cores]
            self._router = ReplicaRouter(num_blocks, cache.block_size, cache.enable_prefix_caching)
        self._receivers: list[asyncio.Task[None]] = []
        self._adapters: dict[int, str] = {}  # paths of those that were loaded, by id; they may have been evicted since
        # Asked of each request that is queued: who is to be told of its outputs, or None.
        self.observer: Callable[[str, ProcessedPrompt, Any], Callable[[RequestOutput], None] | None] | None = None
        self._resumed: asyncio.Event | None = None  # set while it is not paused; None = it never was

    @property
    def tokenizer(self) -> Any:
        """The tokenizer that `get_tokenizer` gives; None with skip_tokenizer_init."""
        own = self.input_processor.tokenizer
        return None if own is None else own.hf_tokenizer

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
        return cls(
            vllm_config,
            log_stats=not disable_log_stats,
            log_requests=enable_log_requests,
            stat_loggers=stat_loggers,
            client_addresses=client_addresses,
        )

    @classmethod
    def from_engine_args(
        cls,
        engine_args: EngineArgs,
        start_engine_loop: bool = True,
        usage_context: Any = None,
        stat_loggers: Sequence[Any] | None = None,
    ) -> Self:
        """Build the configuration and the engine; see from_vllm_config. ValueError for bad arguments."""
        config = engine_args.create_engine_config()
        return cls.from_vllm_config(
            config,
            start_engine_loop,
            usage_context,
            stat_loggers,
            enable_log_requests=getattr(engine_args, "enable_log_requests", False),
            disable_log_stats=engine_args.disable_log_stats,
        )

    async def generate(
        self,
        prompt: Any,
        sampling_params: SamplingParams,
        request_id: str,
        *,
        prompt_text: str | None = None,
        lora_request: Any = None,
        tokenization_kwargs: Mapping[str, Any] | None = None,
        trace_headers: Mapping[str, str] | None = None,
        priority: int = 0,
        data_parallel_rank: int | None = None,
        session_id: str | None = None,
        kv_hints: Any = None,
        reasoning_ended: bool | None = None,
        reasoning_parser_kwargs: Mapping[str, Any] | None = None,
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
            prompt_text=prompt_text,
            session_id=session_id,
            kv_hints=kv_hints,
            reasoning_ended=reasoning_ended,
            reasoning_parser_kwargs=reasoning_parser_kwargs,
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
                await asyncio.shield(self.abort(request_id, with_output=False))

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
        session_id: str | None = None,
        prompt_text: str | None = None,
        kv_hints: Any = None,
        reasoning_ended: bool | None = None,
        reasoning_parser_kwargs: Mapping[str, Any] | None = None,
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
            session_id, prompt_text, kv_hints: as of LLMEngine.add_request.
            reasoning_ended: True or None; a form binds an answer from its first token on.
            reasoning_parser_kwargs: options of a parser in the engine, which has none: a server's reads its texts.

        Raises:
            VLLMValidationError: a bad prompt, parameter, id or adapter; nothing is queued then.
            EngineDeadError: the engine is dead.
        """
        self._check_alive()
        if data_parallel_rank is not None:
            message = "data_parallel_rank is not supported: the engine chooses the replica"
            raise VLLMValidationError(message, "data_parallel_rank", data_parallel_rank)
        if reasoning_ended is False and getattr(params, "structured_outputs", None) is not None:
            message = (
                "reasoning_ended must be True or None with structured_outputs: a form binds from the first token on"
            )
            raise VLLMValidationError(message, "reasoning_ended", reasoning_ended)
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
        processed = with_notes(processed, prompt_text, session_id, kv_hints)
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
        """InputProcessor.process_prompts, for long texts, embeddings and pictures in a thread."""
        process = self.input_processor.process_prompts
        is_large = any(isinstance(prompt, dict) and not _LARGE.isdisjoint(prompt) for prompt in prompts)
        if is_large or sum(len(_text_of(prompt)) for prompt in prompts) > _LONG_TEXT:
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
            stream = self.replicas[0].add(request_id, processed, checked, priority, changed)
            return self._observed(stream, processed, checked)
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
            stream = self.replicas[index].add(request_id, processed, checked, priority, changed)
        except BaseException:
            router.end([request_id])
            raise
        return self._observed(stream, processed, checked)

    def _observed(self, stream: RequestStream, prompt: ProcessedPrompt, params: Any) -> RequestStream:
        if self.observer is not None:
            stream.observe = self.observer(stream.request_id, prompt, params)
        return stream

    async def decide(
        self,
        input: Any,
        questions: Any,
        request_id: str | None = None,
        *,
        priority: int = 0,
        lora_request: LoRARequest | None = None,
        **options: Any,
    ) -> Decision:
        """Answer typed questions about one input; a cancelled call aborts its requests.

        Args:
            input: a text, or a list of OpenAI's messages and tool calls.
            questions, **options: as for LLM.decide.
            request_id, priority, lora_request: as for `add_request`; without an id one is made.

        Raises:
            VLLMValidationError: as for LLM.decide, or a bad id or priority.
            EngineDeadError: the engine is dead.
        """
        params = DecisionParams(**options)
        # In a thread: templates and long inputs may be slow.
        plan = await asyncio.to_thread(
            DecisionPlan, self.model_config, self.input_processor.tokenizer, input, questions, params
        )
        requests = plan.requests()
        if request_id is None:
            request_id = f"decision-{uuid.uuid4().hex}"
        for _, own in requests:
            self.input_processor.check_request(request_id, own, priority)
        prompts = await self.with_adapters([prompt for prompt, _ in requests], [lora_request] * len(requests))
        names = [f"{request_id}-{index}" for index in range(len(requests))]
        try:
            streams = [
                await self.add_checked(name, prompt, own, priority)
                for name, prompt, (_, own) in zip(names, prompts, requests, strict=True)
            ]
            outputs = [await _last(stream) for stream in streams]
        except BaseException:
            await asyncio.shield(self.abort(names, with_output=False))
            raise
        finished = [output for output in outputs if output is not None and output.finished]
        finished = [output for output in finished if output.outputs[0].finish_reason != "abort"]
        if len(finished) < len(outputs):
            raise GenerationError(f"request {request_id!r} was aborted")
        return plan.decision(finished)

    async def abort(self, request_id: str | Iterable[str], internal: bool = False, *, with_output: bool = True) -> None:
        """Drop requests; unknown ids are ignored. Their streams end by a finished output: of what there is,
        with the finish reason "abort", or of a pooling model with an error and no data; without `with_output`, by none.
        `internal` changes nothing."""
        request_ids = [request_id] if isinstance(request_id, str) else list(request_id)
        for replica in self.replicas:
            replica.abort(request_ids, with_output)
        if self._router is not None:
            self._router.end(request_ids)

    async def check_health(self) -> None:
        """Raises EngineDeadError when the engine is dead."""
        self._check_alive()

    @property
    def errored(self) -> bool:
        return self.dead_error is not None

    @property
    def dead_error(self) -> EngineDeadError | None:
        """Why the engine is dead; None: it is not."""
        errors = (replica.core.dead_error for replica in self.replicas)
        return next((error for error in errors if error is not None), None)

    @property
    def num_unfinished_sequences(self) -> int:
        """Number of unfinished sequences; a request may have several."""
        return sum(replica.num_unfinished_sequences for replica in self.replicas)

    async def wait_dead(self) -> EngineDeadError:
        """Wait until the engine is dead; returns the cause."""
        self._start_receiving()
        done, _ = await asyncio.wait(self._receivers, return_when=asyncio.FIRST_COMPLETED)
        for receiver in done:
            receiver.result()  # raises any other error that ended it
        assert self.dead_error is not None
        return self.dead_error

    @property
    def core_pids(self) -> list[int]:
        """Process ids of the engine cores, one a replica."""
        return [replica.core.pid for replica in self.replicas]

    def kill_cores(self) -> None:
        """End the cores' processes without waiting for anything, when this one is about to end."""
        for replica in self.replicas:
            replica.core.kill()

    def shutdown(self, timeout: float | None = None) -> None:
        """End the cores' processes; open streams get EngineDeadError. `timeout` has no effect: a core that does not
        end when it is asked to is killed."""
        for receiver in self._receivers:
            receiver.cancel()
        _close_cores([replica.core for replica in self.replicas])
        for replica in self.replicas:
            if replica.core.dead_error is None:
                replica.core.dead_error = EngineDeadError("the engine was shut down")
            self._fail(replica, replica.core.dead_error)
        if self.tracer is not None:
            self.tracer.shutdown()

    @property
    def num_unfinished_requests(self) -> int:
        """Requests whose last output has not been produced."""
        return sum(replica.output_processor.num_unfinished_requests for replica in self.replicas)

    @property
    def unfinished_request_ids(self) -> list[str]:
        """The ids of those requests."""
        return [each for own in self.replicas for each in own.output_processor.unfinished_request_ids]

    @property
    def _is_paused(self) -> bool:
        return self._resumed is not None and not self._resumed.is_set()

    async def _wait_while_paused(self) -> None:
        """Until requests go on, or the engine is dead."""
        while self._resumed is not None and not self._resumed.is_set():
            await self._resumed.wait()
            self._check_alive()

    @routed("POST", "/pause", {"status": "paused"})
    async def pause_generation(
        self, *, mode: str = "abort", wait_for_inflight_requests: bool = False, clear_cache: bool = True
    ) -> None:
        """Take no further requests: those that come wait for `resume_generation`.

        Args:
            mode: "abort" ends the requests that are there, with an output of finish reason "abort"; "wait" runs them to
                their ends; "keep" leaves them as they are, to go on later.
            wait_for_inflight_requests: older form of mode="wait".
            clear_cache: forget cached prefixes, too; what is kept then begins anew.

        Raises:
            VLLMValidationError: another mode, or "wait" for requests that were kept when the engine fell asleep.
        """
        mode = "wait" if wait_for_inflight_requests else mode
        check_pause_mode(mode)
        if mode == "wait" and self.num_unfinished_requests:
            if await self.is_sleeping():
                message = 'mode must not be "wait": requests wait themselves until a sleeping engine wakes up'
                raise VLLMValidationError(message, "mode", mode)
            # Requests that were kept run, too.
            await self._call("pause", False)
        if self._resumed is None:
            self._resumed = asyncio.Event()
        self._resumed.clear()
        if mode == "keep":
            await self._call("pause")
        elif mode == "abort":
            await self.abort(self.unfinished_request_ids)
        while mode == "wait" and self.num_unfinished_requests:
            self._check_alive()
            await asyncio.sleep(_PAUSE_POLL_SECONDS)
        if clear_cache:
            await self.reset_prefix_cache(reset_running_requests=True)

    @routed("POST", "/resume", {"status": "resumed"})
    async def resume_generation(self) -> None:
        """Undo `pause_generation`. While the engine sleeps requests wait on, for `wake_up`."""
        if await self.is_sleeping():
            return
        await self._call("pause", False)
        if self._resumed is not None:
            self._resumed.set()

    @routed("GET", "/is_paused", "is_paused")
    async def is_paused(self) -> bool:
        """Whether pause_generation was called, and resume_generation was not since."""
        return self._is_paused

    async def collective_rpc(
        self,
        method: str | Callable[..., Any],
        timeout: float | None = None,
        args: tuple = (),
        kwargs: dict[str, Any] | None = None,
    ) -> list[Any]:
        """Call a method of every worker of every replica by name, or a function with the worker as its first argument;
        arguments and results are what msgpack can hold. `timeout`: see LLMEngine.collective_rpc.

        Raises:
            ValueError: the function cannot be sent to another process.
        """
        sent = method if isinstance(method, str) else pickled("collective_rpc", method)
        return await self._workers(sent, *args, **(kwargs or {}))

    async def _quieten(self, mode: str) -> None:
        await self.pause_generation(mode=mode)

    async def _go_on(self) -> None:
        await self.resume_generation()

    async def _load_adapter(self, request: LoRARequest) -> None:
        error = next(filter(None, await self._call("try_add_lora", dict(vars(request)))), None)
        if error is not None:
            if len(self.replicas) > 1 and request.lora_int_id not in self._adapters:
                await self._call("remove_lora", request.lora_int_id)
            raise VLLMValidationError(error, "lora_request", request.lora_name)
        self._adapters[request.lora_int_id] = request.lora_path

    def _forget_adapter(self, lora_id: int) -> None:
        self._adapters.pop(lora_id, None)

    def _forget_prefixes(self) -> None:
        if self._router is not None:
            self._router.forget_prefixes()

    def _check_tensors(self) -> None:
        message = "weights must be a file's path, or what a trainer sends: the engine is in another process"
        raise VLLMValidationError(message, "update_info", None)

    async def _call(self, method: str, *arguments: Any) -> list[Any]:
        """Call a method of all replicas; one result a replica."""
        self._check_alive()
        return await asyncio.gather(*(replica.core.call(method, *arguments) for replica in self.replicas))

    def _check_alive(self) -> None:
        if self.dead_error is not None:
            raise self.dead_error
        self._start_receiving()

    def _start_receiving(self) -> None:
        # The loop in which they ran may have ended: programs call asyncio.run again and again.
        if all(each.cancelled() or each.get_loop().is_closed() for each in self._receivers):
            self._receivers = [asyncio.create_task(self._receive(replica)) for replica in self.replicas]

    async def _receive(self, replica: Replica) -> None:
        try:
            await replica.core.receive(partial(self._take, replica), partial(self._is_busy, replica))
        except EngineDeadError as error:
            self._fail(replica, error)

    def _is_busy(self, replica: Replica) -> bool:
        """Whether outputs are expected."""
        return bool(replica.num_unfinished_sequences) and not self._is_paused

    def _take(self, replica: Replica, outputs: list[EngineCoreOutput], stats: dict[str, Any]) -> None:
        processed = replica.take(outputs, stats)
        if self._router is not None:
            self._router.begin(processed.begun)
            self._router.end(processed.ended)

    def _fail(self, replica: Replica, error: EngineDeadError) -> None:
        lost = replica.fail(error)
        if self._resumed is not None:
            self._resumed.set()
        if self._router is not None:
            self._router.end(lost)


def _start_cores(config: VllmConfig, first: CoreProcessHandle | None) -> list[CoreClient]:
    """A core for each replica, not ready yet."""
    parallel = config.parallel_config
    num_replicas = parallel.data_parallel_size
    if num_replicas > usable_cores():
        logger.warning("%d replicas share %d CPU cores: they take turns", num_replicas, usable_cores())
    if parallel.distributed_executor_backend == "ray" and parallel.placement_group is None:
        # The cores' processes belong to no actor.
        parallel = replace(parallel, placement_group=current_placement_group())
    cores = []
    processes = with_replicas(first or start_core(), num_replicas)
    try:
        for rank, process in enumerate(processes):
            own = replace(config, parallel_config=replace(parallel, data_parallel_rank=rank))
            name = "the engine core" if num_replicas == 1 else f"engine core {rank}"
            cores.append(CoreClient(own, process, name))
    except BaseException:
        for each in processes:
            end_core(each)
        raise
    return cores


def _text_of(prompt: Any) -> str:
    """The prompt's text if it is to be tokenised, else empty."""
    text = prompt.get("prompt") if isinstance(prompt, dict) and "prompt_token_ids" not in prompt else prompt
    return text if isinstance(text, str) else ""


def _close_cores(cores: Sequence[CoreClient]) -> None:
    """End the cores in parallel."""
    for core in cores:
        core.ask_to_stop()
    for core in cores:
        core.close()


async def _last(stream: RequestStream) -> RequestOutput | None:
    last = None
    async for output in stream:
        last = output
    return last
