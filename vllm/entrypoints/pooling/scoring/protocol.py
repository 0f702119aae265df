"""Bodies of scores."""

from vllm.server.protocol.rerank import RerankRequest, RerankResponse
from vllm.server.protocol.rerank import ScorePairsResponse as ScoreResponse

__all__ = ["RerankRequest", "RerankResponse", "ScoreResponse"]
