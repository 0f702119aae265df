"""Bodies of requests and answers."""

from vllm.entrypoints.openai.protocol.generation import (
    ChatChoice,
    ChatChunkChoice,
    ChatCompletionChunk,
    ChatCompletionRequest,
    ChatCompletionResponse,
    ChatDelta,
    ChatFields,
    ChatLogprob,
    ChatLogprobs,
    ChatMessage,
    ChatPositionLogprobs,
    ChoiceFields,
    CompletionChoice,
    CompletionLogprobs,
    CompletionRequest,
    CompletionResponse,
    ErrorInfo,
    ErrorResponse,
    GenerationFields,
    PromptLogprob,
    StreamOptions,
    Usage,
)

__all__ = [
    "ChatChoice", "ChatChunkChoice", "ChatCompletionChunk", "ChatCompletionRequest", "ChatCompletionResponse",
    "ChatDelta", "ChatFields", "ChatLogprob", "ChatLogprobs", "ChatMessage", "ChatPositionLogprobs", "ChoiceFields",
    "CompletionChoice", "CompletionLogprobs", "CompletionRequest", "CompletionResponse", "ErrorInfo", "ErrorResponse",
    "GenerationFields", "PromptLogprob", "StreamOptions", "Usage",
]  # fmt: skip
