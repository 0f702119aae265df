"""The engine: requests in, outputs out."""

from vllm.v1.messages import EngineCoreOutput, EngineCoreRequest

__all__ = ["EngineCoreOutput", "EngineCoreRequest"]
