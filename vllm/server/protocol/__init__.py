"""Bodies of requests and answers, also by the names that upstream had for them here."""

from vllm.entrypoints.openai.protocol.generation import *  # noqa: F403
from vllm.entrypoints.openai.protocol.generation import ChatCompletionChunk, ChatDelta, ChatLogprobs, Usage
from vllm.entrypoints.openai.protocol.pooling import EmbeddingRequest as EmbeddingRequest
from vllm.entrypoints.openai.protocol.tokenization import DetokenizeRequest as DetokenizeRequest
from vllm.entrypoints.openai.protocol.tokenization import TokenizeRequest as TokenizeRequest
from vllm.entrypoints.openai.protocol.tools import ChatCompletionToolsParam as ChatCompletionToolsParam
from vllm.entrypoints.openai.protocol.tools import FunctionDefinition as FunctionDefinition

ChatCompletionStreamResponse = ChatCompletionChunk
ChatCompletionLogProbs = ChatLogprobs
DeltaMessage = ChatDelta
UsageInfo = Usage
