"""Bodies of completions."""

from vllm.server.protocol import (
    CompletionChoice,
    CompletionLogprobs,
    CompletionRequest,
    CompletionResponse,
)

CompletionResponseChoice = CompletionChoice
CompletionLogProbs = CompletionLogprobs
# The events of a stream have the shape of the whole.
CompletionStreamResponse = CompletionResponse
CompletionResponseStreamChoice = CompletionChoice

__all__ = [
    "CompletionLogProbs",
    "CompletionRequest",
    "CompletionResponse",
    "CompletionResponseChoice",
    "CompletionResponseStreamChoice",
    "CompletionStreamResponse",
]
