"""One answer of a chat for routes that have other shapes: their bodies become chat's, and its steps their events."""

from __future__ import annotations

import re
from collections.abc import AsyncGenerator, Iterator, Mapping
from contextlib import aclosing, contextmanager
from dataclasses import dataclass
from typing import Any

from fastapi import Request
from starlette.responses import Response

from vllm.answers.events import Event
from vllm.exceptions import VLLMValidationError
from vllm.logger import init_logger
from vllm.outputs import RequestOutput
from vllm.server.errors import ApiError, as_api_error
from vllm.server.http.routes import parse_body
from vllm.server.http.streaming import NamedEventStream
from vllm.server.protocol.generation import ChatCompletionRequest
from vllm.server.rendering.written_json import PartsResponse
from vllm.server.serving.engine_requests import while_connected
from vllm.server.serving.generation.chat import ChatReply, prompt_ids
from vllm.server.serving.generation.replies import Submitted
from vllm.server.serving.usage import UsageCount
from vllm.server.state import ServerState

logger = init_logger(__name__)


@dataclass(frozen=True)
class Step:
    """An output's addition to the answer.

    Attributes:
        events: what it adds, part by part.
        logprobs: chat's entries for the step's tokens; None: not asked for.
        fields: what else a choice of chat has, as `readings`.
        finish_reason: chat's, of the last step.
        stop_reason: the stop text or token that ended it, if one did.
    """

    events: list[Event]
    logprobs: list[dict[str, Any]] | None
    fields: dict[str, Any]
    finish_reason: str | None
    stop_reason: int | str | None


class ChatSteps:
    """The steps of a reply to the body `fields` of chat. `names`: what the route calls these, as errors do.

    Raises:
        ApiError, VLLMValidationError: a field that cannot be honoured.
    """

    def __init__(
        self, request: Request, state: ServerState, fields: dict[str, Any], answer_id: str, names: Mapping[str, str]
    ) -> None:
        self._state, self._names = state, names
        with renamed(names):
            self.body: ChatCompletionRequest = parse_body(fields, ChatCompletionRequest, False)
            self.answer = ChatReply(self.body, state, answer_id, parts_reasoning=True)
        self.usage = UsageCount(request)
        self._request = request
        self.prompt_fields: dict[str, Any] = {}
        self._has_begun = False

    def last_fields(self) -> dict[str, Any]:
        """Fields of chat's answer beside its choice: the prompt's and `labels`, as far as asked for."""
        labels = self.answer.head()["labels"]
        return {**self.prompt_fields, **({"labels": labels} if labels else {})}

    async def prompt_length(self) -> int:
        """Tokens of the prompt."""
        with renamed(self._names):
            return len(await prompt_ids(self._state, await self.answer.prompt(), bool(self.body.add_special_tokens)))

    async def submit(self) -> Submitted:
        """See `Reply.submit`."""
        with renamed(self._names):
            return await self.answer.noted_submit(self._request)

    async def steps(self, submission: Submitted) -> AsyncGenerator[Step, None]:
        """All of them; one, if the body does not ask for a stream."""
        if not self.body.stream:
            (output,) = await submission.results()
            yield await self._step(output)
            return
        async with aclosing(submission.events()) as outputs:
            async for _, output in outputs:
                yield await self._step(output)

    async def _step(self, output: RequestOutput) -> Step:
        self.usage.add(0, output)
        self.answer.log.add(0, output)
        if not self._has_begun:
            self.prompt_fields = await self.answer.prompt_fields(output)
        (completion,) = output.outputs
        # Whether it ends with calls is known once it is parsed.
        events = self.answer.parsed(completion)
        fields = await self.answer.choice_fields(completion, is_first=not self._has_begun)
        self._has_begun = True
        logprobs = fields.pop("logprobs")
        reason, stop = fields.pop("finish_reason"), fields.pop("stop_reason")
        del fields["index"]
        return Step(events, None if logprobs is None else logprobs["content"], fields, reason, stop)


async def respond(request: Request, reply: Any, stream: bool) -> Response:
    """The events of a MessageReply or a ResponseReply, or the answer that they make."""
    if stream:
        submission = await while_connected(request, reply.submit())
        return NamedEventStream(reply.events(submission), reply.release(submission))

    async def whole() -> dict[str, Any]:
        submission = await reply.submit()
        async with aclosing(reply.events(submission)) as events:
            async for _ in events:
                pass
        return reply.answer

    return PartsResponse(await while_connected(request, whole()))


def shown_error(error: Exception) -> ApiError:
    """An error for the event of a stream; one that nobody expects is logged."""
    found = as_api_error(error)
    if found.code == "internal_error":
        logger.exception("an answer failed")
    return found


@contextmanager
def renamed(names: Mapping[str, str]) -> Iterator[None]:
    """Errors about fields of chat as those of the route: `names` maps one to the other."""
    try:
        yield
    except ApiError as error:
        if (found := _renamed(error.message, error.param, names)) is None:
            raise
        raise ApiError(error.status, found[0], found[1], error.code, error.retry_after) from None
    except VLLMValidationError as error:
        if (found := _renamed(error.args[0], error.parameter, names)) is None:
            raise
        raise type(error)(*found, error.value) from None


def _renamed(message: str, param: str | None, names: Mapping[str, str]) -> tuple[str, str] | None:
    match = re.match(r"\w+", param or "")
    if match is None or match[0] not in names:
        return None
    assert param is not None
    own = names[match[0]]
    return re.sub(rf"\b{match[0]}\b", own, message), own + param[match.end() :]
