"""Upstream's path of vllm.loader."""

from vllm.loader import NO_EMBEDDED_MODEL, ResolvedModel, embedded_model_path, get_model, resolve_model
from vllm.model_executor.model_loader.sharded_state_loader import ShardedStateLoader

__all__ = [
    "NO_EMBEDDED_MODEL",
    "ResolvedModel",
    "ShardedStateLoader",
    "embedded_model_path",
    "get_model",
    "resolve_model",
]
