"""Bodies of chat completions."""

from vllm.entrypoints.openai.protocol import (
    BatchChatCompletionRequest,
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
    "BatchChatCompletionRequest",
    "ChatCompletionRequest",
    "ChatCompletionResponse",
    "ChatCompletionResponseChoice",
    "ChatCompletionResponseStreamChoice",
    "ChatCompletionStreamResponse",
    "ChatMessage",
]
