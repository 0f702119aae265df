"""Bodies of completions."""

from vllm.entrypoints.openai.protocol import (
    CompletionChoice,
    CompletionLogprobs,
    CompletionRequest,
    CompletionResponse,
)

CompletionResponseChoice = CompletionChoice
CompletionLogProbs = CompletionLogprobs

__all__ = ["CompletionLogProbs", "CompletionRequest", "CompletionResponse", "CompletionResponseChoice"]
