"""Bodies of chat completions."""

from vllm.entrypoints.openai.protocol import (
    ChatChoice,
    ChatChunkChoice,
    ChatCompletionChunk,
    ChatCompletionRequest,
    ChatCompletionResponse,
    ChatMessage,
)

ChatCompletionResponseChoice = ChatChoice
ChatCompletionResponseStreamChoice = ChatChunkChoice
ChatCompletionStreamResponse = ChatCompletionChunk

__all__ = [
    "ChatCompletionRequest",
    "ChatCompletionResponse",
    "ChatCompletionResponseChoice",
    "ChatCompletionResponseStreamChoice",
    "ChatCompletionStreamResponse",
    "ChatMessage",
]
