"""Bodies of chat completions."""

from vllm.server.protocol import (
    BatchChatCompletionRequest,
    ChatChoice,
    ChatChunkChoice,
    ChatCompletionChunk,
    ChatCompletionRequest,
    ChatCompletionResponse,
    ChatMessage,
)
from vllm.server.protocol.tools import (
    ChatCompletionNamedToolChoiceParam,
    ChatCompletionToolsParam,
    FunctionDefinition,
)

ChatCompletionResponseChoice = ChatChoice
ChatCompletionResponseStreamChoice = ChatChunkChoice
ChatCompletionStreamResponse = ChatCompletionChunk

__all__ = [
    "ChatCompletionNamedToolChoiceParam",
    "ChatCompletionToolsParam",
    "FunctionDefinition",
    "BatchChatCompletionRequest",
    "ChatCompletionRequest",
    "ChatCompletionResponse",
    "ChatCompletionResponseChoice",
    "ChatCompletionResponseStreamChoice",
    "ChatCompletionStreamResponse",
    "ChatMessage",
]
