"""Bodies of requests and answers, also by the names that upstream had for them here."""

from vllm.server.protocol.generation import *  # noqa: F403
from vllm.server.protocol.generation import ChatCompletionChunk, ChatDelta, ChatLogprobs, Usage
from vllm.server.protocol.pooling import EmbeddingRequest as EmbeddingRequest
from vllm.server.protocol.tokenization import DetokenizeRequest as DetokenizeRequest
from vllm.server.protocol.tokenization import TokenizeRequest as TokenizeRequest
from vllm.server.protocol.tools import ChatCompletionToolsParam as ChatCompletionToolsParam
from vllm.server.protocol.tools import FunctionDefinition as FunctionDefinition

ChatCompletionStreamResponse = ChatCompletionChunk
ChatCompletionLogProbs = ChatLogprobs
DeltaMessage = ChatDelta
UsageInfo = Usage
