"""A norm as its NormSpec says."""

from __future__ import annotations

from vllm.layers.layernorm import LayerNorm, RMSNorm
from vllm.layers.sharding import Shard
from vllm.models.spec import NormSpec

Norm = RMSNorm | LayerNorm


def make_norm(spec: NormSpec, size: int, heads: Shard | None = None) -> Norm:
    """The norm of `spec` over `size` values; with `heads`, of which the rank holds some, a weight for each."""
    cls = RMSNorm if spec.kind == "rms" else LayerNorm
    return cls(size, spec.eps, spec.weight, spec.bias, spec.offset, heads)
