"""Bodies of embeddings."""

from vllm.entrypoints.openai.protocol.pooling import CohereEmbedRequest, EmbeddingRequest, EmbeddingResponse

__all__ = ["CohereEmbedRequest", "EmbeddingRequest", "EmbeddingResponse"]
