"""A replica of the model: one engine core, its requests and its counts."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from vllm.exceptions import EngineDeadError
from vllm.outputs import RequestOutput
from vllm.sampling_params import RequestOutputKind, SamplingParams
from vllm.tracing import RequestTracer
from vllm.v1.engine.core_process.client import CoreClient
from vllm.v1.engine.input_processor import InputProcessor, ProcessedPrompt
from vllm.v1.engine.output_processor import OutputProcessor, ProcessedOutputs
from vllm.v1.engine.pooling_output_processor import PoolingOutputProcessor
from vllm.v1.messages import EngineCoreOutput
from vllm.v1.metrics.engine_metrics import EngineMetrics
from vllm.v1.metrics.stats import IterationStats


class Replica:
    """A ready engine core and the state of its requests. Belongs to one event loop."""

    def __init__(self, core: CoreClient, input_processor: InputProcessor, tracer: RequestTracer | None = None) -> None:
        self.core = core
        self.metrics = EngineMetrics(input_processor.model_config.max_model_len)
        self.stats: dict[str, Any] = {}  # EngineCore.stats as of the last step; empty before the first
        self.output_processor: Any = PoolingOutputProcessor(self.metrics)
        if input_processor.model_config.runner_type != "pooling":
            tokenizer, config = input_processor.tokenizer, input_processor.model_config
            self.output_processor = OutputProcessor(tokenizer, self.metrics, tracer, config)
        self.streams: dict[str, RequestStream] = {}
        self._input_processor = input_processor
        self._listener: Callable[[Mapping[str, Any], IterationStats], None] | None = None

    def listen(self, listener: Callable[[Mapping[str, Any], IterationStats], None]) -> None:
        """Have `listener` called after each step, with the core's `stats` and what the step brought."""
        self._listener = listener
        self.metrics.listen()

    @property
    def is_dead(self) -> bool:
        return self.core.dead_error is not None

    @property
    def num_unfinished_sequences(self) -> int:
        return self.output_processor.num_unfinished_sequences

    def add(
        self,
        request_id: str,
        processed: ProcessedPrompt,
        checked: SamplingParams,
        priority: int,
        changed: asyncio.Event | None,
    ) -> RequestStream:
        """See AsyncLLM.add_checked."""
        now = time.monotonic()
        children = self.output_processor.add_request(request_id, processed, checked, now, priority)
        stream = RequestStream(request_id, checked.output_kind is RequestOutputKind.DELTA, changed)
        self.streams[request_id] = stream
        try:
            for request in self._input_processor.core_requests(children, processed, now, priority):
                self.core.add_request(request)
        except BaseException:
            self.abort([request_id])
            raise
        return stream

    def abort(self, request_ids: Iterable[str], with_output: bool = False) -> None:
        """Drop requests, unknown ids are ignored; see AsyncLLM.abort."""
        own = [each for each in request_ids if each in self.streams]
        if not own:
            return
        for output in self.output_processor.outputs_so_far(own) if with_output else ():
            self.streams[output.request_id].put(output)
        core_ids = self.output_processor.abort_requests(own)
        for each in own:
            self.streams.pop(each).end()
        if core_ids and not self.is_dead:
            self.core.abort_requests(core_ids)

    def take(self, outputs: list[EngineCoreOutput], stats: dict[str, Any]) -> ProcessedOutputs:
        """Hand a step's outputs to their streams."""
        self.stats = stats
        self.output_processor.weight_version = stats["weight_version"]
        processed = self.output_processor.process_outputs(outputs, stats["time"])
        for output in processed.request_outputs:
            stream = self.streams.get(output.request_id)
            if stream is not None:
                stream.put(output)
                if output.finished:
                    del self.streams[output.request_id]
        if processed.requests_to_abort:
            self.core.abort_requests(processed.requests_to_abort)
        for request in self._input_processor.further_requests(processed.to_queue):
            self.core.add_request(request)
        if self._listener is not None:
            self._listener(stats, self.metrics.take_iteration())
        return processed

    def fail(self, error: EngineDeadError) -> list[str]:
        """End every stream with the error; returns the requests' ids."""
        streams, self.streams = self.streams, {}
        self.output_processor.abort_requests(streams, "error")
        for stream in streams.values():
            stream.end(error)
        return list(streams)


class RequestStream:
    """The outputs of one request, in order; ends after the finished one, or when the request is aborted. Without
    `keeps_all` (deltas) a slow reader gets the newest output only. `changed` (which streams may share) is set with each
    output and at the end. It `is_finished` once its reader has had all of it."""

    def __init__(self, request_id: str, keeps_all: bool, changed: asyncio.Event | None = None) -> None:
        self.request_id = request_id
        self.is_ended = False
        self._keeps_all = keeps_all
        self._outputs: list[RequestOutput] = []
        self._error: BaseException | None = None
        self._changed = changed or asyncio.Event()
        self.is_finished = False
        self.observe: Callable[[RequestOutput], None] | None = None

    def put(self, output: RequestOutput) -> None:
        """Add the next output, of which an observer is told."""
        if self.observe is not None:
            self.observe(output)
        if not self._keeps_all:
            self._outputs.clear()
        self._outputs.append(output)
        self._changed.set()

    def end(self, error: BaseException | None = None) -> None:
        """End the stream; a reader gets `error` after the outputs, if it is given."""
        self.is_ended = True
        self._error = error
        self._changed.set()

    def take(self) -> list[RequestOutput]:
        """The outputs not taken yet; raises the error that the stream ended with when there are none."""
        outputs, self._outputs = self._outputs, []
        if not outputs and self._error is not None:
            raise self._error
        return outputs

    def __aiter__(self) -> RequestStream:
        return self

    async def __anext__(self) -> RequestOutput:
        if self.is_finished:
            raise StopAsyncIteration
        while not self._outputs:
            if self.is_ended:
                self.is_finished = True
                raise StopAsyncIteration if self._error is None else self._error
            self._changed.clear()
            await self._changed.wait()
        output = self._outputs.pop(0)
        self.is_finished = output.finished
        return output
