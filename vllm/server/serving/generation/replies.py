"""The generating endpoints share this: a request on its way from body to answer, whole or as a stream of chunks."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from contextlib import aclosing
from typing import Any

from fastapi import Request
from starlette.responses import Response

from vllm.logger import init_logger
from vllm.outputs import RequestOutput
from vllm.sampling_params import SamplingParams
from vllm.server.http.streaming import EventStream
from vllm.server.rendering.written_json import PartsResponse
from vllm.server.serving.engine_requests import BeamSubmission, Submission, while_connected
from vllm.server.serving.generation.prompt_tables import TableReply
from vllm.server.serving.generation.sampling import PreparedPrompts, named_as
from vllm.server.serving.usage import UsageCount
from vllm.server.state import ServerState

Submitted = Submission | BeamSubmission


class Reply(ABC):
    """A request on its way to its answer.

    Raises:
        ApiError, VLLMValidationError: a field that cannot be honoured.
    """

    _own_names: Mapping[str, str]  # what fields of SamplingParams are called in the body
    _params: SamplingParams

    def __init__(
        self, body: Any, state: ServerState, answer_id: str, frame: dict[str, Any], tables: TableReply | None = None
    ) -> None:
        """`frame`: what every chunk begins with. `tables`: what is answered of the prompt as arrays."""
        self._body, self._state, self._id, self._frame = body, state, answer_id, frame
        self.tables = tables
        self.log = OutputLog(state, answer_id)

    @property
    def params(self) -> SamplingParams:
        """The answer's parameters."""
        return self._params

    @abstractmethod
    async def prepare(self) -> PreparedPrompts:
        """See `prepare_prompts`."""

    @abstractmethod
    async def whole(self, outputs: list[RequestOutput], usage: UsageCount) -> dict[str, Any]:
        """The answer, from the finished output of each prompt."""

    @abstractmethod
    def pieces(self, index: int, output: RequestOutput) -> AsyncIterator[dict[str, Any]]:
        """The parts of the chunks for an output of prompt `index` beside frame and usage."""

    async def submit(self) -> Submitted:
        """Check everything and queue it; errors as of `prepare` and Submission.queue."""
        prepared = await self.prepare()
        if self.tables is not None:
            await self.tables.check_prompts(prepared)
        kind = BeamSubmission if self._params.use_beam_search else Submission
        with named_as(self._own_names):
            return await kind.queue(self._state, self._id, *prepared, self._body.priority or 0)

    async def noted_submit(self, request: Request) -> Submitted:
        """`submit`, with the log's note in the request's line of the access log."""
        submitted = await self.submit()
        request.state.note = self.log.note
        return submitted

    def table_response(self, request: Request, submission: Submitted) -> Response:
        """The answer in the type that the Accept header names."""
        assert self.tables is not None and isinstance(submission, Submission)
        metadata = {"request_id": self._id, "model": self._state.answer_name}
        return self.tables.response(request, submission, metadata)

    async def chunks(self, submission: Submitted, request: Request) -> AsyncGenerator[dict[str, Any], None]:
        """The events of a streamed answer."""
        usage = UsageCount(request, self._body.stream_options, self._state.args.enable_force_include_usage)
        params: dict[str, Any] = {}
        async with aclosing(submission.events()) as events:
            async for index, output in events:
                usage.add(index, output)
                self.log.add(index, output)
                if not index:
                    params |= _transfer_params(output)
                async for piece in self.pieces(index, output):
                    if usage.in_every_chunk or _says_anything(piece):
                        yield {**self._frame, **piece, **usage.so_far()}
        if params:
            yield {**self._frame, "choices": [], **params, **usage.so_far()}
        if usage.is_wanted_last:
            yield {**self._frame, **usage.last_chunk_fields()}


def _transfer_params(output: RequestOutput) -> dict[str, Any]:
    """A connector's parameters for the engine that computes on; as upstream's answers, those of the first prompt."""
    return {} if output.kv_transfer_params is None else {"kv_transfer_params": output.kv_transfer_params}


def _says_anything(piece: dict[str, Any]) -> bool:
    """Whether a chunk has more than deltas without a word: markers are parsed, and characters wait for their bytes."""
    return piece.keys() != {"choices"} or any(map(_is_said, piece["choices"]))


def _is_said(choice: dict[str, Any]) -> bool:
    if "delta" not in choice:
        return True
    said = {**choice, **choice["delta"], **(choice["logprobs"] or {})}
    return any(value for name, value in said.items() if name not in ("index", "delta", "logprobs"))


async def respond(request: Request, answer: Reply, stream: bool) -> Response:
    """Generate and answer, whole, as events or as bytes; aborts with ClientDisconnected when the client disconnects."""
    if answer.tables is not None and answer.tables.body_type is not None:
        submission = await while_connected(request, answer.noted_submit(request))
        return answer.table_response(request, submission)
    if stream:
        submission = await while_connected(request, answer.noted_submit(request))
        return EventStream(answer.chunks(submission, request), submission.abort)

    async def whole() -> Any:
        submission = await answer.noted_submit(request)
        outputs, usage = await submission.results(), UsageCount(request)
        for index, output in enumerate(outputs):
            usage.add(index, output)
            answer.log.add(index, output)
        return {**await answer.whole(outputs, usage), **_transfer_params(outputs[0])}

    return PartsResponse(await while_connected(request, whole()))


logger = init_logger(__name__)


class OutputLog:
    """Logs each sequence of a request when it is finished; of a stream the pieces are put together."""

    def __init__(self, state: ServerState, answer_id: str) -> None:
        self._is_on = state.args.enable_log_outputs
        self._longest = state.args.max_log_len
        self._id = answer_id
        self.note: str | None = None  # what is to be said of the answer
        self._texts: dict[tuple[int, int], str] = defaultdict(str)
        self._token_ids: dict[tuple[int, int], list[int]] = defaultdict(list)

    def add(self, index: int, output: RequestOutput) -> None:
        """Take an output of prompt `index`."""
        if not self._is_on:
            return
        for completion in output.outputs:
            key = index, completion.index
            self._texts[key] += completion.text
            self._token_ids[key] += completion.token_ids
            if completion.finish_reason is None:
                continue
            text, ids = self._texts.pop(key), self._token_ids.pop(key)
            name = f"{self._id}-{index}-{completion.index}"
            shown = text[: self._longest], ids[: self._longest]
            note = f" ({self.note})" if self.note else ""
            logger.info("output %s: %r, ids %s of %d, %s%s", name, *shown, len(ids), completion.finish_reason, note)
