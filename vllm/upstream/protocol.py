"""Bodies for programs that build a server around an engine, as upstream has them: open to further fields, which the
endpoints check; and what they answer with, whose choices and results are models, too."""

from __future__ import annotations

from typing import Any

from fastapi import UploadFile
from pydantic import BaseModel, ConfigDict, Field

from vllm.server.protocol import generation, pooling, rerank, tokenization

_OPEN = ConfigDict(extra="allow")


class ChatCompletionRequest(generation.ChatCompletionRequest):
    """POST /v1/chat/completions"""

    model_config = _OPEN


class BatchChatCompletionRequest(generation.BatchChatCompletionRequest):
    """POST /v1/chat/completions/batch"""

    def to_chat_completion_request(self, messages: list[Any]) -> ChatCompletionRequest:
        """The request for one of the conversations."""
        one = super().to_chat_completion_request(messages)
        return ChatCompletionRequest.model_construct(**dict(one))


class CompletionRequest(generation.CompletionRequest):
    """POST /v1/completions"""

    model_config = _OPEN


class EmbeddingCompletionRequest(pooling.EmbeddingRequest):
    """POST /v1/embeddings of texts"""

    model_config = _OPEN

    input: pooling.Input


class EmbeddingChatRequest(pooling.EmbeddingRequest):
    """POST /v1/embeddings of a conversation"""

    model_config = _OPEN

    messages: pooling.Conversations


class ScoreTextRequest(rerank.ScorePairsRequest):
    """POST /score"""

    model_config = _OPEN


class TokenizeCompletionRequest(tokenization.TokenizeRequest):
    """POST /tokenize of a text"""

    model_config = _OPEN

    prompt: str


class TokenizeChatRequest(tokenization.TokenizeRequest):
    """POST /tokenize of a conversation"""

    model_config = _OPEN

    messages: generation.Messages


class DetokenizeRequest(tokenization.DetokenizeRequest):
    """POST /detokenize"""

    model_config = _OPEN


class TranscriptionRequest(BaseModel):
    """A form of /v1/audio/transcriptions, which is not served: no model here transcribes."""

    model_config = ConfigDict(extra="allow", arbitrary_types_allowed=True)

    file: UploadFile
    model: str | None = None
    language: str | None = None
    prompt: str = ""
    response_format: str = "json"
    stream: bool | None = False
    temperature: float = 0.0


class Answer(BaseModel):
    """An answer of an endpoint, or a part of one: it holds what the endpoint gave, and nothing else."""

    model_config = ConfigDict(extra="allow", protected_namespaces=())


class TranscriptionResponse(Answer):
    """A text that was spoken."""

    text: str


class TranscriptionStreamResponse(Answer):
    """A part of one."""

    id: str
    object: str = "transcription.chunk"
    created: int
    model: str
    choices: list[Any]


class ChatMessage(Answer):
    """A message."""

    role: str
    content: str | None = None


class ChatCompletionResponseChoice(Answer):
    """A choice of a chat's answer."""

    index: int
    message: ChatMessage
    logprobs: Any = None
    finish_reason: str | None = None


class CompletionResponseChoice(Answer):
    """A choice of a completion."""

    index: int
    text: str
    logprobs: Any = None
    finish_reason: str | None = None


class UsageInfo(Answer):
    """Counts of tokens."""

    prompt_tokens: int = 0
    total_tokens: int = 0


class ChatCompletionResponse(Answer):
    """The answer of /v1/chat/completions."""

    id: str
    object: str = "chat.completion"
    created: int
    model: str
    choices: list[ChatCompletionResponseChoice]
    usage: UsageInfo


class CompletionResponse(Answer):
    """The answer of /v1/completions."""

    id: str
    object: str = "text_completion"
    created: int
    model: str
    choices: list[CompletionResponseChoice]
    usage: UsageInfo


class _List(Answer):
    id: str
    object: str = "list"
    created: int
    model: str
    usage: UsageInfo


class EmbeddingResponseData(Answer):
    """An embedding, as numbers or in base64."""

    index: int
    object: str = "embedding"
    embedding: list[float] | str


class EmbeddingResponse(_List):
    """The answer of /v1/embeddings."""

    data: list[EmbeddingResponseData]


class ScoreResponseData(Answer):
    """A pair's score."""

    index: int
    object: str = "score"
    score: float


class ScoreResponse(_List):
    """The answer of /score."""

    data: list[ScoreResponseData]


class TokenizeResponse(Answer):
    """The answer of /tokenize."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None = None


class DetokenizeResponse(Answer):
    """The answer of /detokenize."""

    prompt: str


class ErrorInfo(Answer):
    """An error; `code` is the HTTP status."""

    message: str
    type: str
    param: str | None = None
    code: int


class ErrorResponse(Answer):
    """An error in place of an answer."""

    error: ErrorInfo


class ModelCard(Answer):
    """A model, or an adapter, whose `parent` is its model."""

    id: str
    object: str = "model"
    created: int = 0
    owned_by: str = "vllm"
    root: str | None = None
    parent: str | None = None
    max_model_len: int | None = None


class ModelList(Answer):
    """The models that a server has."""

    object: str = "list"
    data: list[ModelCard] = Field(default_factory=list)
