"""Bodies of embeddings."""

from vllm.server.protocol.pooling import CohereEmbedRequest, EmbeddingRequest, EmbeddingResponse

__all__ = ["CohereEmbedRequest", "EmbeddingRequest", "EmbeddingResponse"]
