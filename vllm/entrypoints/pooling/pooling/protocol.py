"""Bodies of /pooling."""

from vllm.server.protocol.pooling import PoolingRequest, PoolingResponse

__all__ = ["PoolingRequest", "PoolingResponse"]
