"""POST /invocations, as SageMaker calls a model's container."""

from __future__ import annotations

from fastapi import APIRouter

from vllm.entrypoints.openai.http.routes import post_by_field
from vllm.entrypoints.openai.protocol.generation import (
    ChatCompletionChunk,
    ChatCompletionRequest,
    ChatCompletionResponse,
    CompletionRequest,
    CompletionResponse,
)
from vllm.entrypoints.openai.serving.chat import create_chat_completion
from vllm.entrypoints.openai.serving.completion import create_completion

router = APIRouter()

post_by_field(
    router,
    "/invocations",
    "A body with `messages` is one of /v1/chat/completions, a body with `prompt` one of /v1/completions.",
    {
        "messages": (ChatCompletionRequest, ChatCompletionResponse, ChatCompletionChunk, create_chat_completion),
        "prompt": (CompletionRequest, CompletionResponse, CompletionResponse, create_completion),
    },
)
