"""Bodies of embeddings."""

from vllm.entrypoints.openai.protocol.embeddings import EmbeddingRequest, EmbeddingResponse

__all__ = ["EmbeddingRequest", "EmbeddingResponse"]
