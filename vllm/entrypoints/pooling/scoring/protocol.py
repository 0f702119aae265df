"""Bodies of scores."""

from vllm.entrypoints.openai.protocol.rerank import RerankRequest, RerankResponse
from vllm.entrypoints.openai.protocol.rerank import ScorePairsResponse as ScoreResponse

__all__ = ["RerankRequest", "RerankResponse", "ScoreResponse"]
