"""POST /v1/responses, and the count of its input's tokens."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing
from functools import partial
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from vllm.exceptions import shown
from vllm.server.errors import ApiError, json_response
from vllm.server.http.routes import post
from vllm.server.protocol.responses import InputTokens, ResponseEvent, ResponseObject, ResponsesRequest
from vllm.server.response_store import Conversation, RunningResponse, StoredResponse
from vllm.server.serving.engine_requests import Submission, while_connected
from vllm.server.serving.generation.chat_steps import ChatSteps, respond, shown_error
from vllm.server.serving.generation.replies import Submitted
from vllm.server.serving.responses.chat_fields import CHAT_NAMES, chat_fields, check_fields
from vllm.server.serving.responses.input_items import Item, new_id, normal_items, to_messages
from vllm.server.serving.responses.writer import ResponseWriter
from vllm.server.state import ServerState

router = APIRouter()


@post(router, "/v1/responses", ResponsesRequest, ResponseObject, ResponseEvent)
async def create_response(request: Request, state: ServerState, body: ResponsesRequest) -> Response:
    """Answer a text or a conversation, which may be one that the server keeps."""
    return await respond(request, ResponseReply(request, state, body), bool(body.stream))


@post(router, "/v1/responses/input_tokens", ResponsesRequest, InputTokens)
async def count_input_tokens(request: Request, state: ServerState, body: ResponsesRequest) -> Response:
    """How many tokens a response's prompt would have."""
    answer = ResponseReply(request, state, body)
    length = await while_connected(request, answer.prompt_length(answer.items))
    return json_response({"object": "response.input_tokens", "input_tokens": length})


class ResponseReply:
    """A response on its way. The constructor raises ApiError for a field that cannot be honoured."""

    def __init__(self, request: Request, state: ServerState, body: ResponsesRequest) -> None:
        self._request, self._state, self._body = request, state, body
        self.id = new_id("resp")
        check_fields(body)
        self._conversation = _conversation(state, body)
        context: list[Item] = []
        if body.previous_response_id is not None:
            context = state.responses.response(body.previous_response_id, "previous_response_id").context
        elif self._conversation is not None:
            context = self._conversation.context
        self._new_items = [] if body.input is None else normal_items(body.input, state.responses.item)
        self._places = {item["id"]: f"input[{index}]" for index, item in enumerate(self._new_items)}
        self.items = [*context, *self._new_items]
        if not self.items:
            raise ApiError(400, "input is required", "input", "missing_field")
        self._keeps = body.store is not False

    @property
    def answer(self) -> dict[str, Any]:
        """As far as the events have made it."""
        return self.writer.response

    async def submit(self) -> Submitted:
        """Check everything and queue it; errors as of `Reply.submit`."""
        items = self.items
        if self._body.truncation == "auto":
            items = await self._fitting(items)
        fields = chat_fields(self._body, to_messages(self._body.instructions, items, self._places))
        self.turn = ChatSteps(self._request, self._state, fields, self.id, CHAT_NAMES)
        submission = await self.turn.submit()
        self.writer = ResponseWriter(self._head())
        cancel = partial(Submission.cut_short, self._state, [self.id])
        self._state.responses.running[self.id] = RunningResponse(self.writer.response, cancel, self._keeps)
        return submission

    async def events(self, submission: Submitted) -> AsyncGenerator[dict[str, Any], None]:
        """The events of a response. What fails after the first one is an event of a stream."""
        writer, usage = self.writer, self.turn.usage
        try:
            for event in writer.begin():
                yield event
            async with aclosing(self.turn.steps(submission)) as steps:
                async for step in steps:
                    for event in writer.take(step):
                        yield event
            counts = _usage(usage.fields(), self._count(writer.reasoning_text))
            last = writer.end(counts, **self.turn.last_fields())
            self._keep()
            for event in last:
                yield event
        except Exception as error:
            if not self._body.stream:
                raise
            for event in writer.fail(shown_error(error).body()["error"]["message"]):
                yield event
        finally:
            self._state.responses.running.pop(self.id, None)

    def release(self, submission: Submitted) -> Callable[[], Awaitable[None]]:
        """A function that frees the request of a client that has left before the first event."""

        async def free() -> None:
            self._state.responses.running.pop(self.id, None)
            await submission.abort()

        return free

    async def prompt_length(self, items: list[Item]) -> int:
        """Tokens of the prompt that the items make."""
        fields = chat_fields(self._body, to_messages(self._body.instructions, items, self._places))
        return await ChatSteps(self._request, self._state, fields, self.id, CHAT_NAMES).prompt_length()

    async def _fitting(self, items: list[Item]) -> list[Item]:
        """The items from the first turn of the user's with which all fits."""
        room = self._state.engine.model_config.max_model_len - (self._body.max_output_tokens or 1)
        is_turn = [item["type"] == "message" and item["role"] == "user" for item in items]
        starts = [0, *(index for index, found in enumerate(is_turn) if found and index)]
        low, high = 0, len(starts) - 1
        while low < high:
            middle = (low + high) // 2
            if await self.prompt_length(items[starts[middle] :]) <= room:
                high = middle
            else:
                low = middle + 1
        return items[starts[low] :]

    def _count(self, reasoning: str) -> int:
        return len(self._state.tokenizer.encode(reasoning, add_special_tokens=False)) if reasoning else 0

    def _keep(self) -> None:
        """Put the response, and what it adds to a conversation, where later requests find them."""
        store, conversation = self._state.responses, self._conversation
        if store.running[self.id].keeps:
            store.put(self.id, StoredResponse(self.writer.response, self.items))
        if conversation is not None:
            conversation.items += [*self._new_items, *self.writer.response["output"]]
            store.renew(conversation.head["id"], conversation)

    def _head(self) -> dict[str, Any]:
        body, params = self._body, self.turn.answer.params
        text, reasoning = body.text, body.reasoning
        told = {"format": {"type": "text"}, **({} if text is None else text.model_dump(exclude_none=True))}
        summary = None if reasoning is None else reasoning.summary or reasoning.generate_summary
        conversation = self._conversation
        return {
            "id": self.id,
            "object": "response",
            "created_at": int(time.time()),
            "completed_at": None,
            "error": None,
            "incomplete_details": None,
            "instructions": body.instructions,
            "max_output_tokens": body.max_output_tokens,
            "max_tool_calls": body.max_tool_calls,
            "model": self._state.answer_name,
            "parallel_tool_calls": body.parallel_tool_calls is not False,
            "previous_response_id": body.previous_response_id,
            "conversation": None if conversation is None else {"id": conversation.head["id"]},
            "reasoning": {"effort": None if reasoning is None else reasoning.effort, "summary": summary},
            "background": False,
            "service_tier": "default",
            "store": self._keeps,
            "temperature": params.temperature,
            "top_p": params.top_p,
            "text": told,
            "tool_choice": body.tool_choice or "auto",
            "tools": body.tools or [],
            "top_logprobs": body.top_logprobs or 0,
            "truncation": body.truncation or "disabled",
            "metadata": body.metadata or {},
            "user": None,
            "usage": None,
        }


def _conversation(state: ServerState, body: ResponsesRequest) -> Conversation | None:
    given = body.conversation
    if given is None:
        return None
    name = given.get("id") if isinstance(given, dict) else given
    if not isinstance(name, str):
        message = f"conversation must be an id or an object with one, got {shown(given)}"
        raise ApiError(400, message, "conversation", "invalid_type")
    if body.previous_response_id is not None:
        message = "previous_response_id and conversation exclude each other: give one of them"
        raise ApiError(400, message, "conversation", "invalid_value")
    return state.responses.conversation(name, "conversation")


def _usage(counts: dict[str, Any], num_reasoning: int) -> dict[str, Any]:
    """Chat's usage as a response's. The reasoning's tokens are counted from its text."""
    cached = counts["prompt_tokens_details"]["cached_tokens"]
    return {
        "input_tokens": counts["prompt_tokens"],
        "input_tokens_details": {"cached_tokens": cached, "cache_write_tokens": 0},
        "output_tokens": counts["completion_tokens"],
        "output_tokens_details": {"reasoning_tokens": min(num_reasoning, counts["completion_tokens"])},
        "total_tokens": counts["total_tokens"],
    }
