"""POST /invocations, as SageMaker calls a model's container."""

from __future__ import annotations

from fastapi import APIRouter

from vllm.entrypoints.openai.http.routes import BodyKind, post_by_field
from vllm.entrypoints.openai.protocol.generation import (
    ChatCompletionChunk,
    ChatCompletionRequest,
    ChatCompletionResponse,
    CompletionRequest,
    CompletionResponse,
)
from vllm.entrypoints.openai.protocol.pooling import (
    ClassificationRequest,
    ClassificationResponse,
    EmbeddingRequest,
    EmbeddingResponse,
    PoolingRequest,
    PoolingResponse,
)
from vllm.entrypoints.openai.protocol.rerank import (
    RerankRequest,
    RerankResponse,
    ScorePairsRequest,
    ScorePairsResponse,
)
from vllm.entrypoints.openai.serving.chat import create_chat_completion
from vllm.entrypoints.openai.serving.classify import classify
from vllm.entrypoints.openai.serving.completion import create_completion
from vllm.entrypoints.openai.serving.embeddings import create_embeddings
from vllm.entrypoints.openai.serving.pooling import pooling
from vllm.entrypoints.openai.serving.rerank import rerank, score_pairs_of_texts

router = APIRouter()

_POOLED = (
    BodyKind(EmbeddingRequest, EmbeddingResponse, create_embeddings),
    BodyKind(ClassificationRequest, ClassificationResponse, classify),
    BodyKind(PoolingRequest, PoolingResponse, pooling),
)
_PAIRS = (BodyKind(ScorePairsRequest, ScorePairsResponse, score_pairs_of_texts),)

post_by_field(
    router,
    "/invocations",
    "A body with `messages` is one of /v1/chat/completions, with `prompt` one of /v1/completions, with `query` of "
    "/rerank, with `text_1`, `data_1` or `queries` of /score; of a pooling model one with `input` or `messages` is of "
    "/v1/embeddings, /classify or /pooling, the first that the model can.",
    {
        "messages": (
            BodyKind(ChatCompletionRequest, ChatCompletionResponse, create_chat_completion, ChatCompletionChunk),
            *_POOLED,
        ),
        "prompt": (BodyKind(CompletionRequest, CompletionResponse, create_completion, CompletionResponse),),
        "input": _POOLED,
        "query": (BodyKind(RerankRequest, RerankResponse, rerank),),
        **dict.fromkeys(ScorePairsRequest.ONE_OF, _PAIRS),
    },
)
