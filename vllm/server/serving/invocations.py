"""POST /invocations, as SageMaker calls a model's container."""

from __future__ import annotations

from fastapi import APIRouter

from vllm.server.http.routes import BodyKind, post_by_field
from vllm.server.protocol.generation import (
    ChatCompletionChunk,
    ChatCompletionRequest,
    ChatCompletionResponse,
    CompletionRequest,
    CompletionResponse,
)
from vllm.server.protocol.pooling import (
    ClassificationRequest,
    ClassificationResponse,
    EmbeddingRequest,
    EmbeddingResponse,
    PoolingRequest,
    PoolingResponse,
)
from vllm.server.protocol.rerank import (
    RerankRequest,
    RerankResponse,
    ScorePairsRequest,
    ScorePairsResponse,
)
from vllm.server.serving.generation.chat import create_chat_completion
from vllm.server.serving.generation.completion import create_completion
from vllm.server.serving.pooling.classify import classify
from vllm.server.serving.pooling.embeddings import create_embeddings
from vllm.server.serving.pooling.pooling import pooling
from vllm.server.serving.pooling.rerank import rerank, score_pairs_of_texts

router = APIRouter()

_POOLED = (
    BodyKind(EmbeddingRequest, EmbeddingResponse, create_embeddings),
    BodyKind(ClassificationRequest, ClassificationResponse, classify),
    BodyKind(PoolingRequest, PoolingResponse, pooling),
)
_COMPLETIONS = (BodyKind(CompletionRequest, CompletionResponse, create_completion, CompletionResponse),)
_PAIRS = (BodyKind(ScorePairsRequest, ScorePairsResponse, score_pairs_of_texts),)

post_by_field(
    router,
    "/invocations",
    "A body with `messages` is one of /v1/chat/completions, with `prompt` or `prompt_embeds` one of /v1/completions, "
    "with `query` of /rerank, with `text_1`, `data_1` or `queries` of /score; of a pooling model one with `input` or "
    "`messages` is of /v1/embeddings, /classify or /pooling, the first that the model can.",
    {
        "messages": (
            BodyKind(ChatCompletionRequest, ChatCompletionResponse, create_chat_completion, ChatCompletionChunk),
            *_POOLED,
        ),
        **dict.fromkeys(("prompt", "prompt_embeds"), _COMPLETIONS),
        "input": _POOLED,
        "query": (BodyKind(RerankRequest, RerankResponse, rerank),),
        **dict.fromkeys(ScorePairsRequest.ONE_OF, _PAIRS),
    },
)
