"""Bodies of classes."""

from vllm.entrypoints.openai.protocol.pooling import ClassificationRequest, ClassificationResponse

__all__ = ["ClassificationRequest", "ClassificationResponse"]
