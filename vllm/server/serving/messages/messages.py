"""POST /v1/messages and /v1/messages/count_tokens."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from vllm.answers.answer import AUTO, AnswerFormat
from vllm.server.errors import ApiError, json_response
from vllm.server.http.routes import post
from vllm.server.protocol.messages import (
    MessageEvent,
    MessageObject,
    MessagesCountRequest,
    MessagesError,
    MessagesRequest,
    MessageTokens,
)
from vllm.server.serving.engine_requests import request_id_of, while_connected
from vllm.server.serving.generation.chat_steps import ChatSteps, respond, shown_error
from vllm.server.serving.generation.replies import Submitted
from vllm.server.serving.messages.chat_fields import CHAT_NAMES, chat_fields
from vllm.server.serving.messages.writer import MessageWriter
from vllm.server.state import ServerState

router = APIRouter()


@post(router, "/v1/messages", MessagesRequest, MessageObject, MessageEvent, error=MessagesError)
async def create_message(request: Request, state: ServerState, body: MessagesRequest) -> Response:
    """Answer a conversation in Anthropic's shape."""
    return await respond(request, MessageReply(request, state, body), bool(body.stream))


@post(router, "/v1/messages/count_tokens", MessagesCountRequest, MessageTokens, error=MessagesError)
async def count_tokens(request: Request, state: ServerState, body: MessagesCountRequest) -> Response:
    """How many tokens a message's prompt would have."""
    turn = ChatSteps(request, state, _fields(state, body), _message_id(request, body), CHAT_NAMES)
    return json_response({"input_tokens": await while_connected(request, turn.prompt_length())})


def _message_id(request: Request, body: MessagesCountRequest) -> str:
    return request_id_of(request, "msg", body.request_id, mark="_")


def _fields(state: ServerState, body: MessagesCountRequest) -> dict[str, Any]:
    """See `chat_fields`. A model that does not think keeps within any budget of it."""
    fields, template = chat_fields(body), body.chat_template
    thinks = (
        AnswerFormat.of(state.template_text(template), None, AUTO).reasoning or state.answer_format(template).reasoning
    )
    if thinks is None:
        fields.pop("thinking_token_budget", None)
    return fields


class MessageReply:
    """A message on its way. The constructor raises ApiError for a field that cannot be honoured."""

    def __init__(self, request: Request, state: ServerState, body: MessagesRequest) -> None:
        self._request, self._state, self._body = request, state, body
        self._id = _message_id(request, body)
        self._fields = _fields(state, body)
        self._is_cut_by_context = False
        self.writer = MessageWriter(self._id, state.answer_name)

    @property
    def answer(self) -> dict[str, Any]:
        """As far as the events have made it."""
        return self.writer.message

    async def submit(self) -> Submitted:
        """Check everything and queue it; errors as of `Reply.submit`."""
        try:
            return await self._submit()
        except ApiError as error:
            if (error.code, error.param) != ("context_length_exceeded", "max_tokens"):
                raise
        # The field must be given, so that clients give more than fits: the answer ends with the context.
        self._is_cut_by_context = True
        del self._fields["max_completion_tokens"]
        return await self._submit()

    async def _submit(self) -> Submitted:
        self.turn = ChatSteps(self._request, self._state, self._fields, self._id, CHAT_NAMES)
        return await self.turn.submit()

    async def events(self, submission: Submitted) -> AsyncGenerator[dict[str, Any], None]:
        """The events of a message. What fails after the first one is an event of a stream."""
        writer, has_begun = self.writer, False
        try:
            async with aclosing(self.turn.steps(submission)) as steps:
                async for step in steps:
                    if not has_begun:
                        has_begun = True
                        for event in writer.begin(self._usage()):
                            yield event
                    for event in writer.take(step):
                        yield event
            for event in writer.end(self._usage(), self._is_cut_by_context, **self.turn.last_fields()):
                yield event
        except Exception as error:
            if not self._body.stream:
                raise
            yield shown_error(error).body(self._request.url.path)

    def release(self, submission: Submitted) -> Callable[[], Awaitable[None]]:
        """A function that frees the request of a client that has left before the first event."""
        return submission.abort

    def _usage(self) -> dict[str, int]:
        counts = self.turn.usage.fields()
        cached = counts["prompt_tokens_details"]["cached_tokens"]
        return {
            "input_tokens": counts["prompt_tokens"] - cached,
            "cache_read_input_tokens": cached,
            "cache_creation_input_tokens": 0,
            "output_tokens": counts["completion_tokens"],
        }
