"""The step that a model of a caller's computes: its layers read it, as they are called without it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

from vllm.attention.backend import AttentionMetadata, KVCache


class Step:
    """Caches and requests of a step: one for all layers of a model."""

    def __init__(self) -> None:
        self.kv_caches: list[KVCache] = []
        self.attn: AttentionMetadata | None = None


@dataclass
class ForwardContext:
    """Surroundings of a forward, as upstream's layers find them.

    Attributes:
        attn_metadata: the step's, of vllm.attention.backend.
        no_compile_layers: the attention layers, by their prefixes.
        virtual_engine: 0, the one stage of a pipeline.
    """

    attn_metadata: Any = None
    no_compile_layers: dict[str, Any] = field(default_factory=dict)
    virtual_engine: int = 0
    dp_metadata: None = None
    slot_mapping: Any = None
    batch_descriptor: None = None
    additional_kwargs: dict[str, Any] = field(default_factory=dict)


_context: ContextVar[ForwardContext | None] = ContextVar("forward_context", default=None)


@contextmanager
def forward_context(context: ForwardContext) -> Iterator[None]:
    """Let `get_forward_context` give `context` within."""
    token = _context.set(context)
    try:
        yield
    finally:
        _context.reset(token)


@contextmanager
def set_forward_context(attn_metadata: Any, vllm_config: Any, **others: Any) -> Iterator[None]:
    """Make a context of the caller's the one that `get_forward_context` gives within. The engine sets its own around
    each step.

    Args:
        attn_metadata: what layers find as it.
        vllm_config: not used.
        others: upstream's sizes of the batch; not used, as nothing is padded or split between engines.
    """
    with forward_context(ForwardContext(attn_metadata=attn_metadata)):
        yield


def get_forward_context() -> ForwardContext:
    """
    Raises:
        AssertionError: no model of a caller's is being run.
    """
    context = _context.get()
    assert context is not None, "there is no forward context: one is set while the engine runs a caller's model"
    return context


def is_forward_context_available() -> bool:
    """Whether a caller's model is being run."""
    return _context.get() is not None
