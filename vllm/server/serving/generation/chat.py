"""POST /v1/chat/completions."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from vllm.chat import normal_messages, render_conversations
from vllm.exceptions import shown
from vllm.outputs import CompletionOutput, RequestOutput
from vllm.server.errors import ApiError
from vllm.server.http.routes import post
from vllm.server.protocol.generation import (
    ChatCompletionChunk,
    ChatCompletionRequest,
    ChatCompletionResponse,
)
from vllm.server.protocol.pooling import PoolingFields
from vllm.server.protocol.tokenization import TokenizeRequest
from vllm.server.rendering.logprobs import chat_logprobs
from vllm.server.serving.engine_requests import request_id_of
from vllm.server.serving.generation.answers import Answer, respond
from vllm.server.serving.generation.completion_choices import ChoiceWriter
from vllm.server.serving.generation.sampling import PreparedPrompts, named_as, prepare_prompts, sampling_params
from vllm.server.serving.usage import UsageCount, answer_frame
from vllm.server.state import ServerState
from vllm.utils.checks import wrong_type

router = APIRouter()

_OWN_NAMES = {"logprobs": "top_logprobs", "prompt": "messages", "extra_args": "vllm_xargs"}


@post(router, "/v1/chat/completions", ChatCompletionRequest, ChatCompletionResponse, ChatCompletionChunk)
async def create_chat_completion(request: Request, state: ServerState, body: ChatCompletionRequest) -> Response:
    """Answer a conversation, and read the logprobs of chosen tokens."""
    answer = ChatAnswer(body, state, request_id_of(request, "chatcmpl", body.request_id))
    return await respond(request, answer, bool(body.stream))


def render(state: ServerState, body: ChatCompletionRequest | TokenizeRequest | PoolingFields) -> dict[str, Any]:
    """The prompt of the request's conversation; see `render_conversations`."""
    if body.chat_template is not None and not state.args.trust_request_chat_template:
        message = (
            "chat_template: a template is a program, and this server runs those of requests only with "
            "--trust-request-chat-template"
        )
        raise ApiError(400, message, "chat_template", "unsupported_field")
    args = state.args
    variables = dict(args.default_chat_template_kwargs or {})
    tools = None
    if isinstance(body, ChatCompletionRequest):
        own = {
            "reasoning_effort": body.reasoning_effort,
            "documents": body.documents,
            "verbosity": _known_verbosity(state, body),
        }
        variables |= {name: value for name, value in own.items() if value}
        tools = None if args.exclude_tools_when_tool_choice_none else body.tools or None
    (prompt,) = render_conversations(
        body.messages,
        state.tokenizer,
        chat_template=body.chat_template or state.chat_template,
        add_generation_prompt=_begins_answer(body),
        continue_final_message=bool(body.continue_final_message),
        tools=tools,
        chat_template_kwargs=variables | (body.chat_template_kwargs or {}),
        content_format=args.chat_template_content_format,
    )
    if isinstance(body, ChatCompletionRequest) and body.add_special_tokens:
        # Where it is cut, the special tokens stay.
        return {"prompt": prompt["prompt"]}
    return dict(prompt)


def _begins_answer(body: ChatCompletionRequest | TokenizeRequest | PoolingFields) -> bool:
    """Whether the prompt ends with the beginning of an answer; otherwise the last message goes on."""
    return not body.continue_final_message if body.add_generation_prompt is None else body.add_generation_prompt


def _known_verbosity(state: ServerState, body: ChatCompletionRequest) -> str | None:
    """The verbosity, for a template that has the variable. Raises ApiError for one that would change nothing."""
    template = body.chat_template or state.chat_template or state.tokenizer.chat_template
    if "verbosity" in str(template):
        return body.verbosity
    if body.verbosity not in (None, "medium"):
        message = f"verbosity cannot be honoured: the chat template knows none; got {shown(body.verbosity)}"
        raise ApiError(400, message, "verbosity", "unsupported_field")
    return None


def _calls_no_tools(field: str, value: Any) -> ApiError:
    reason = 'this server calls no tools; tool_choice "none" shows them to the template'
    return ApiError(400, f"{field} cannot be honoured: {reason}; got {shown(value)}", field, "unsupported_field")


class ChatAnswer(Answer):
    """See `Answer`."""

    def __init__(self, body: ChatCompletionRequest, state: ServerState, answer_id: str) -> None:
        super().__init__(body, state, answer_id, {**answer_frame(state, answer_id), "object": "chat.completion.chunk"})
        self._max_tokens_field = "max_tokens" if body.max_completion_tokens is None else "max_completion_tokens"
        max_tokens = getattr(body, self._max_tokens_field)
        if body.tool_choice not in (None, "none", "auto"):
            raise _calls_no_tools("tool_choice", body.tool_choice)
        if body.tools and body.tool_choice != "none":
            raise _calls_no_tools("tools", body.tools)
        for name in ("documents", "tools"):
            value = getattr(body, name)
            if not all(isinstance(each, dict) for each in value or ()):
                raise wrong_type(name, value, "a list of objects")
        if body.top_logprobs and not body.logprobs:
            message = f"top_logprobs={body.top_logprobs} needs logprobs=true"
            raise ApiError(400, message, "top_logprobs", "invalid_value")
        self._num_topk = body.num_topk
        last_role = body.messages[-1].get("role")
        self._role = state.args.response_role if _begins_answer(body) else last_role
        self._is_echoed = bool(body.echo) and last_role == self._role
        self._echo = ""
        self._begun: set[int] = set()  # choices of a stream
        shows_topk = max_tokens == 0 and self._num_topk is not None
        self._writer = ChoiceWriter.of(body, state, shows_topk)
        self._plan = self._writer.plan
        self._own_names = {**_OWN_NAMES, "max_tokens": self._max_tokens_field}
        with named_as(self._own_names):
            self._params = sampling_params(body, state, self._plan, max_tokens=max_tokens, logprobs=self._num_topk)

    async def prepare(self) -> PreparedPrompts:
        # In a thread: templates and their library may be slow.
        with named_as({"messages": "chat_template"} if self._body.chat_template else {}):
            prompt = await asyncio.to_thread(render, self._state, self._body)
        if self._is_echoed:
            self._echo = normal_messages(self._body.messages[-1:])[0]["content"]
        with named_as(self._own_names):
            return await prepare_prompts(
                self._state,
                self._body,
                self._id,
                [prompt],
                self._params,
                add_special_tokens=bool(self._body.add_special_tokens),
                prompt_field="messages",
                max_tokens_field=self._max_tokens_field,
            )

    async def whole(self, outputs: list[RequestOutput], usage: UsageCount) -> dict[str, Any]:
        (output,) = outputs
        return {
            **self.head(),
            "choices": await self.choices(output),
            **usage.last_fields(),
            # Clients look for the field whether they asked for it or not.
            "prompt_logprobs": None,
            **await self.prompt_fields(output),
        }

    def head(self) -> dict[str, Any]:
        """Fields of a whole answer beside its choices and usage."""
        return {**self._frame, "object": "chat.completion", "labels": self._plan.label_entries}

    async def choices(self, output: RequestOutput) -> list[dict[str, Any]]:
        """The choices of a whole answer."""
        choices = []
        for completion in output.outputs:
            message = {"role": self._role, "content": self._echo + completion.text, "refusal": None}
            choices.append({"message": message, **await self._choice(completion, is_first=True)})
        return choices

    async def prompt_fields(self, output: RequestOutput) -> dict[str, Any]:
        """The prompt's ids and logprobs, as far as requested."""
        return await self._writer.prompt_fields(output)

    async def pieces(self, index: int, output: RequestOutput) -> AsyncIterator[dict[str, Any]]:
        for completion in output.outputs:
            once: dict[str, Any] = {}
            if not self._begun:
                once = {"labels": self._plan.label_entries} if self._plan.labels else {}
                once.update(await self._writer.prompt_fields(output))
            is_first = completion.index not in self._begun
            self._begun.add(completion.index)
            role = {"role": self._role} if is_first else {}
            if is_first and self._echo:
                # By itself: logprobs are of the text beside them.
                delta = {**role, "content": self._echo}
                choice = {"index": completion.index, "delta": delta, "logprobs": None, "finish_reason": None}
                yield {"choices": [choice], **once}
                role, once = {}, {}
            choice = {"delta": {**role, "content": completion.text}, **await self._choice(completion, is_first)}
            yield {"choices": [choice], **once}

    async def _choice(self, completion: CompletionOutput, is_first: bool) -> dict[str, Any]:
        """Fields beside the text, for what `completion` adds to the choice."""
        readings, ids = completion.logprobs, self._plan.engine_ids
        logprobs = None
        if self._num_topk is not None or ids:
            content: list[dict[str, Any]] = []
            if readings is not None and readings.has_sampled:
                content = await chat_logprobs(readings, self._writer.names, self._num_topk or 0, ids)
            logprobs = {"content": content, "refusal": None}
        return {"index": completion.index, "logprobs": logprobs, **await self._writer.fields(completion, is_first)}
