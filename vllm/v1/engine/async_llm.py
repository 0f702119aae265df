"""The engine for an event loop: requests go in, streams of outputs come back, the core works in its own process."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Callable, Iterable, Sequence
from typing import Any

from vllm.config import VllmConfig
from vllm.engine.arg_utils import EngineArgs
from vllm.exceptions import EngineDeadError, VLLMValidationError
from vllm.outputs import RequestOutput
from vllm.sampling_params import RequestOutputKind, SamplingParams
from vllm.tokenizer import Tokenizer
from vllm.v1.engine import EngineCoreOutput
from vllm.v1.engine.core_client import CoreClient
from vllm.v1.engine.core_start import CoreProcessHandle
from vllm.v1.engine.input_processor import InputProcessor, ProcessedPrompt, check_params_type, load_tokenizer
from vllm.v1.engine.output_processor import OutputProcessor
from vllm.v1.metrics.engine_metrics import EngineMetrics

# Texts longer than this are tokenised in a thread, so that the loop goes on meanwhile.
_LONG_TEXT = 4096


class RequestStream:
    """The outputs of one request, in order: an asynchronous iterator that ends after the finished one, or when the
    request is aborted.

    With CUMULATIVE and FINAL_ONLY outputs a slow reader gets the newest only; deltas are all kept.
    """

    def __init__(self, request_id: str, keeps_all: bool, changed: asyncio.Event | None = None) -> None:
        """
        Args:
            request_id: the request's.
            keeps_all: keep outputs until they are taken; False = the newest one only.
            changed: set when an output has come and at the end; several streams may share it. None = one of its own.
        """
        self.request_id = request_id
        self.is_ended = False
        self._keeps_all = keeps_all
        self._outputs: list[RequestOutput] = []
        self._error: BaseException | None = None
        self._changed = changed or asyncio.Event()
        self._finished = False

    def put(self, output: RequestOutput) -> None:
        """Add the next output."""
        if not self._keeps_all:
            self._outputs.clear()
        self._outputs.append(output)
        self._changed.set()

    def end(self, error: BaseException | None = None) -> None:
        """End the stream: whoever reads on gets the error, if there is one."""
        self.is_ended = True
        self._error = error
        self._changed.set()

    def take(self) -> list[RequestOutput]:
        """The outputs that have come and were not taken yet.

        Raises:
            BaseException: there are none, and the stream has ended with this error.
        """
        outputs, self._outputs = self._outputs, []
        if not outputs and self._error is not None:
            raise self._error
        return outputs

    def __aiter__(self) -> RequestStream:
        return self

    async def __anext__(self) -> RequestOutput:
        if self._finished:
            raise StopAsyncIteration
        while not self._outputs:
            if self.is_ended:
                self._finished = True
                raise StopAsyncIteration if self._error is None else self._error
            self._changed.clear()
            await self._changed.wait()
        output = self._outputs.pop(0)
        self._finished = output.finished
        return output


class AsyncLLM:
    """Generates for requests that come at any time. All methods but the constructor and `shutdown` belong to one event
    loop."""

    def __init__(
        self,
        config: VllmConfig,
        core_process: CoreProcessHandle | None = None,
        meanwhile: Callable[[Tokenizer | None], None] | None = None,
    ) -> None:
        """Start the engine core's process and wait until it is ready.

        Args:
            config: the engine's.
            core_process: one that `start_core` started; None = start one.
            meanwhile: called with the tokenizer while the core loads the model.

        Raises:
            EngineDeadError: it could not start; the message has the cause.
        """
        self.vllm_config = config
        self.model_config = config.model_config
        self._core = CoreClient(config, core_process)
        try:
            self.tokenizer = load_tokenizer(self.model_config)
            if meanwhile is not None:
                meanwhile(self.tokenizer)
            self._core.wait_until_ready()
        except BaseException:
            self._core.close()
            raise
        self.input_processor = InputProcessor(config, self.tokenizer)
        self.metrics = EngineMetrics(self.model_config.max_model_len)
        self.output_processor = OutputProcessor(self.tokenizer, self.metrics)
        self._streams: dict[str, RequestStream] = {}
        self._receiver: asyncio.Task[None] | None = None
        self._stats: dict[str, Any] = {}

    @classmethod
    def from_engine_args(cls, engine_args: EngineArgs) -> AsyncLLM:
        """Build the configuration and the engine.

        Raises:
            ValueError: an argument that cannot be honoured.
            EngineDeadError: the core could not start.
        """
        return cls(engine_args.create_engine_config())

    async def generate(
        self, prompt: Any, sampling_params: SamplingParams, request_id: str, *, priority: int = 0
    ) -> AsyncGenerator[RequestOutput, None]:
        """Generate for one prompt; yields outputs as `sampling_params.output_kind` wants them. Leaving the iteration
        early, by whatever way, aborts the request.

        Raises:
            VLLMValidationError: see `add_request`.
            EngineDeadError: the engine is dead, or dies meanwhile.
        """
        stream = await self.add_request(request_id, prompt, sampling_params, priority=priority)
        finished = False
        try:
            async for output in stream:
                finished = output.finished
                yield output
        finally:
            if not finished and not self.errored:
                await asyncio.shield(self.abort(request_id))

    async def add_request(
        self, request_id: str, prompt: Any, params: SamplingParams, *, priority: int = 0
    ) -> RequestStream:
        """Check and queue one request.

        Args:
            request_id: a name that no unfinished request has.
            prompt: a string, a list of ids, a TextPrompt / TokensPrompt dict, or what the input processor made of one.
            params: what to do with it.
            priority: lower runs earlier under the "priority" policy.

        Raises:
            VLLMValidationError: a bad prompt, parameter or id; nothing is queued then.
            EngineDeadError: the engine is dead.
        """
        self._check_alive()
        self._start_receiving()
        check_params_type(params)
        self.input_processor.check_request(request_id, params, priority)
        if params.logits_processors:
            raise VLLMValidationError(
                "logits_processors are functions, which cannot be sent to the engine's process; load a custom logits "
                "processor instead",
                parameter="logits_processors",
            )
        if isinstance(prompt, ProcessedPrompt):
            processed = prompt
        else:
            (processed,) = await self.process_prompts([prompt], [params])
        checked = self.input_processor.process_params(params, len(processed.token_ids))
        return await self.add_checked(request_id, processed, checked, priority)

    async def process_prompts(
        self, prompts: Sequence[Any], params: Sequence[SamplingParams], *, add_special_tokens: bool = True
    ) -> list[ProcessedPrompt]:
        """Tokenise and check prompts; long texts in a thread, so that the loop goes on meanwhile.

        Raises:
            VLLMValidationError: see InputProcessor.process_prompts.
        """
        process = self.input_processor.process_prompts
        if sum(len(_text_of(prompt)) for prompt in prompts) > _LONG_TEXT:
            return await asyncio.to_thread(process, prompts, params, add_special_tokens=add_special_tokens)
        return process(prompts, params, add_special_tokens=add_special_tokens)

    async def add_checked(
        self,
        request_id: str,
        processed: ProcessedPrompt,
        checked: SamplingParams,
        priority: int = 0,
        changed: asyncio.Event | None = None,
    ) -> RequestStream:
        """Queue a request whose parts are known to be good.

        Args:
            request_id: a name that no unfinished request has.
            processed: from `process_prompts`.
            checked: from `input_processor.process_params`, or of the same quality.
            priority: lower runs earlier under the "priority" policy.
            changed: see RequestStream.

        Raises:
            VLLMValidationError: the id is in use.
            EngineDeadError: the engine is dead.
        """
        self._check_alive()
        self._start_receiving()
        now = time.monotonic()
        children = self.output_processor.add_request(request_id, processed.text, processed.token_ids, checked, now)
        stream = RequestStream(request_id, checked.output_kind is RequestOutputKind.DELTA, changed)
        self._streams[request_id] = stream
        try:
            for child_id, child_params in children:
                self._core.add_request(
                    self.input_processor.core_request(child_id, processed, child_params, now, priority)
                )
        except BaseException:
            # Interrupted or broken half way: nobody will read the stream.
            await asyncio.shield(self.abort(request_id))
            raise
        return stream

    async def abort(self, request_id: str | Iterable[str]) -> None:
        """Drop requests; unknown ids are ignored. Their streams end without a finished output."""
        request_ids = [request_id] if isinstance(request_id, str) else list(request_id)
        core_ids = self.output_processor.abort_requests(request_ids)
        for each in request_ids:
            stream = self._streams.pop(each, None)
            if stream is not None:
                stream.end()
        if core_ids and not self.errored:
            self._core.abort_requests(core_ids)

    async def reset_prefix_cache(self) -> bool:
        """Forget all cached blocks; False, and nothing done, while requests run."""
        return await self._call("reset_prefix_cache")

    async def collective_rpc(self, method: str, args: tuple = (), kwargs: dict[str, Any] | None = None) -> list[Any]:
        """Call a method of every worker by name; arguments and results are what msgpack can hold."""
        return await self._call("collective_rpc", method, args, kwargs)

    async def check_health(self) -> None:
        """
        Raises:
            EngineDeadError: the engine is dead.
        """
        self._start_receiving()
        self._check_alive()

    @property
    def errored(self) -> bool:
        """Whether the engine is dead."""
        return self._core.dead_error is not None

    @property
    def dead_error(self) -> EngineDeadError | None:
        """Why, if it is."""
        return self._core.dead_error

    @property
    def num_unfinished_requests(self) -> int:
        """Requests whose last output has not been produced."""
        return self.output_processor.num_unfinished_requests

    @property
    def num_unfinished_sequences(self) -> int:
        """The same in sequences, of which a request may have several."""
        return self.output_processor.num_unfinished_sequences

    async def wait_dead(self) -> EngineDeadError:
        """Wait until the engine is dead; says why."""
        self._start_receiving()
        assert self._receiver is not None
        await asyncio.shield(self._receiver)
        assert self._core.dead_error is not None
        return self._core.dead_error

    @property
    def stats(self) -> dict[str, Any]:
        """The core's counts (see EngineCore.stats) as of its last step; empty before the first."""
        return self._stats

    @property
    def num_blocks(self) -> int:
        """Blocks of the KV cache."""
        return self._core.num_blocks

    @property
    def core_pid(self) -> int:
        """Process id of the engine core."""
        return self._core.pid

    def shutdown(self) -> None:
        """End the core's process. Streams that are open get EngineDeadError."""
        if self._receiver is not None:
            self._receiver.cancel()
        self._core.close()
        if self._core.dead_error is None:
            self._core.dead_error = EngineDeadError("the engine was shut down")
        self._fail_all(self._core.dead_error)

    async def _call(self, method: str, *arguments: Any) -> Any:
        self._check_alive()
        self._start_receiving()
        return await self._core.call(method, *arguments)

    def _check_alive(self) -> None:
        if self._core.dead_error is not None:
            raise self._core.dead_error

    def _start_receiving(self) -> None:
        if self._receiver is None:
            self._receiver = asyncio.create_task(self._receive())

    async def _receive(self) -> None:
        try:
            await self._core.receive(self._take)
        except EngineDeadError as error:
            self._fail_all(error)

    def _take(self, outputs: list[EngineCoreOutput], stats: dict[str, Any]) -> None:
        """Hand a step's outputs to their streams."""
        self._stats = stats
        processed = self.output_processor.process_outputs(outputs, stats["time"])
        for output in processed.request_outputs:
            stream = self._streams.get(output.request_id)
            if stream is not None:
                stream.put(output)
                if output.finished:
                    del self._streams[output.request_id]
        if processed.requests_to_abort:
            self._core.abort_requests(processed.requests_to_abort)

    def _fail_all(self, error: BaseException) -> None:
        streams, self._streams = self._streams, {}
        self.output_processor.abort_requests(streams, "error")
        for stream in streams.values():
            stream.end(error)


def _text_of(prompt: Any) -> str:
    """The text that is to be tokenised, if there is one."""
    text = prompt.get("prompt") if isinstance(prompt, dict) and "prompt_token_ids" not in prompt else prompt
    return text if isinstance(text, str) else ""
