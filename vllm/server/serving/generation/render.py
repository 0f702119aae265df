"""POST /v1/completions/render and /v1/chat/completions/render: what the engine would get, without generating."""

from __future__ import annotations

from typing import Any

import msgspec
from fastapi import APIRouter, Request
from pydantic import Field
from starlette.responses import Response

from vllm.sampling_params import SamplingParams
from vllm.server.errors import ApiError, json_response
from vllm.server.http.routes import post
from vllm.server.protocol.base import ResponseModel
from vllm.server.protocol.generation import ChatCompletionRequest, CompletionRequest, GenerationFields
from vllm.server.protocol.prompt_tables import PromptTableFields
from vllm.server.serving.engine_requests import request_id_of, while_connected
from vllm.server.serving.generation.chat import ChatReply
from vllm.server.serving.generation.completion import CompletionReply
from vllm.server.serving.generation.prompt_tables import TableReply
from vllm.server.serving.generation.sampling import PreparedPrompts
from vllm.server.state import ServerState

router = APIRouter()


class RenderedPrompt(ResponseModel):
    request_id: str
    model: str
    token_ids: list[int]
    prompt: str | None = Field(description="The text that the ids were made from; null where ids came.")
    sampling_params: dict[str, Any]
    stream: bool
    stream_options: dict[str, Any] | None
    cache_salt: str | None
    priority: int
    encoding_format: str | None = None
    prompt_tables: list[str] | None = None
    prompt_student_logprobs: Any | None = None


@post(router, "/v1/completions/render", CompletionRequest, list[RenderedPrompt])
async def render_completion(request: Request, state: ServerState, body: CompletionRequest) -> Response:
    """The ids and parameters of each prompt, as /v1/completions would use them."""
    if body.prompt_embeds:
        raise ApiError(400, "prompt_embeds has no ids to answer with", "prompt_embeds", "invalid_value")
    answer_id = request_id_of(request, "cmpl", body.request_id)
    tables = await TableReply.of(body, None)

    async def prepare() -> PreparedPrompts:
        prepared = await CompletionReply(body, state, answer_id, tables).prepare()
        if tables is not None:
            await tables.check_prompts(prepared)
        return prepared

    prepared = await while_connected(request, prepare())
    names = [answer_id] if len(prepared[0]) == 1 else [f"{answer_id}-{index}" for index in range(len(prepared[0]))]
    return json_response(_fields(state, body, names, prepared))


@post(router, "/v1/chat/completions/render", ChatCompletionRequest, RenderedPrompt)
async def render_chat_completion(request: Request, state: ServerState, body: ChatCompletionRequest) -> Response:
    """The ids and parameters of a conversation's prompt, as /v1/chat/completions would use them."""
    answer_id = request_id_of(request, "chatcmpl", body.request_id)
    prepared = await while_connected(request, ChatReply(body, state, answer_id).prepare())
    (fields,) = _fields(state, body, [answer_id], prepared)
    return json_response(fields)


def _params_fields(params: SamplingParams) -> dict[str, Any]:
    """The sampling parameters as JSON, without internal fields."""
    fields = msgspec.to_builtins(params, enc_hook=lambda value: getattr(value, "tolist", lambda: str(value))())
    return {name: value for name, value in fields.items() if not name.startswith("_")}


def _fields(
    state: ServerState, body: GenerationFields, names: list[str], prepared: PreparedPrompts
) -> list[dict[str, Any]]:
    options = body.stream_options
    tables = {name: getattr(body, name, None) for name in PromptTableFields.model_fields}
    more = {name: value for name, value in tables.items() if value is not None}
    return [
        {
            "request_id": name,
            "model": state.answer_name,
            "token_ids": list(prompt.token_ids),
            "prompt": prompt.text,
            "sampling_params": _params_fields(params),
            "stream": bool(body.stream),
            "stream_options": None if options is None else options.model_dump(),
            "cache_salt": body.cache_salt,
            "priority": body.priority or 0,
            **more,
        }
        for name, prompt, params in zip(names, *prepared, strict=True)
    ]
