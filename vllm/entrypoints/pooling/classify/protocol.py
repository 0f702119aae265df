"""Bodies of classes."""

from vllm.server.protocol.pooling import ClassificationRequest, ClassificationResponse

__all__ = ["ClassificationRequest", "ClassificationResponse"]
