"""POST /v1/chat/completions/batch."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from vllm.server.errors import ApiError
from vllm.server.http.routes import post
from vllm.server.protocol.generation import BatchChatCompletionRequest, ChatCompletionResponse
from vllm.server.rendering.written_json import PartsResponse
from vllm.server.serving.engine_requests import Submission, request_id_of, while_connected
from vllm.server.serving.generation.chat import ChatReply
from vllm.server.serving.usage import UsageCount
from vllm.server.state import ServerState

router = APIRouter()


@post(router, "/v1/chat/completions/batch", BatchChatCompletionRequest, ChatCompletionResponse)
async def create_batch_chat_completion(
    request: Request, state: ServerState, body: BatchChatCompletionRequest
) -> Response:
    """Answer several conversations: `n` choices for each, in their order, each with its own prompt's fields."""
    for name, reason in (
        ("stream", "batches are answered whole"),
        ("use_beam_search", "batches sample"),
        ("kv_transfer_params", "a batch's answer has none; completions and chat answer with them"),
    ):
        if getattr(body, name):
            raise ApiError(400, f"{name} cannot be honoured: {reason}", name, "unsupported_field")
    state.check_count(len(body.messages), "messages")
    answer_id = request_id_of(request, "chatcmpl", body.request_id)
    answers = [ChatReply(body.to_chat_completion_request(each), state, answer_id) for each in body.messages]

    async def whole() -> dict[str, Any]:
        prompts, params = [], []
        for answer in answers:
            own_prompts, own_params = await answer.prepare()
            prompts += own_prompts
            params += own_params
            request.state.note = answer.log.note
        submission = await Submission.queue(state, answer_id, prompts, params, body.priority or 0)
        usage = UsageCount(request)
        choices: list[dict[str, Any]] = []
        for index, (answer, output) in enumerate(zip(answers, await submission.results(), strict=True)):
            usage.add(index, output)
            answer.log.add(0, output)
            prompt_fields = await answer.prompt_fields(output)
            choices += [{**each, **prompt_fields} for each in await answer.choices(output)]
        numbered = [{**each, "index": index} for index, each in enumerate(choices)]
        return {**answers[0].head(), "choices": numbered, "usage": usage.fields()}

    return PartsResponse(await while_connected(request, whole()))
