"""Bodies of /pooling."""

from vllm.entrypoints.openai.protocol.pooling import PoolingRequest, PoolingResponse

__all__ = ["PoolingRequest", "PoolingResponse"]
