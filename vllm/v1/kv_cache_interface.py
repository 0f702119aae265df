"""What the cache of a model looks like, in upstream's words."""

from __future__ import annotations

from typing import ClassVar

from vllm.utils.unserved import Unserved

_LAYOUT = "the engine lays its cache out itself, by vllm.layers.kv_cache_spec"


class KVCacheConfig(Unserved):
    """Of a whole model."""

    instead: ClassVar[str] = _LAYOUT


class KVCacheSpec(Unserved):
    """Of a layer."""

    instead: ClassVar[str] = _LAYOUT


class AttentionSpec(KVCacheSpec):
    """Of a layer that attends."""


class FullAttentionSpec(AttentionSpec):
    """Of one that attends to all before."""


class SlidingWindowSpec(AttentionSpec):
    """Of one that attends to a window."""


class MambaSpec(KVCacheSpec):
    """Of a recurrent one."""
