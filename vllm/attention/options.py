"""Options by which a layer's attention differs from plain causal attention."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import NamedTuple

from torch import Tensor


@dataclass(frozen=True, eq=False)
class AttentionOptions:
    """Options of one layer; `vllm.ops.paged_attention` defines them all.

    Args:
        scale: factor on the scores, positive; None = head_dim ** -0.5.
        window: tokens that a query sees, itself included, at least 1; None = all before it.
        softcap: bound c of the scores, c * tanh(score / c), positive; None = none.
        alibi_slopes: float32 [Hq] of this rank's query heads: slope * (key's position - query's) is added to scores.
        sinks: float32 [Hq] of this rank's query heads: one more logit in the softmax's denominator.
        chunk: tokens of the parts of a sequence that are attended to apart, at least 1; None = one. Not with a window.
        k_scale, v_scale: positive; keys and values are this times what a cache of 8-bit floats holds.

    Raises:
        ValueError: a value out of range, or slopes or sinks that are not float32 with one dimension.
    """

    scale: float | None = None
    window: int | None = None
    softcap: float | None = None
    alibi_slopes: Tensor | None = None
    sinks: Tensor | None = None
    chunk: int | None = None
    k_scale: float = 1.0
    v_scale: float = 1.0

    def __post_init__(self) -> None:
        for name in ("window", "chunk"):
            tokens = getattr(self, name)
            if tokens is not None and tokens < 1:
                raise ValueError(f"{name} must be at least 1 token or None, got {tokens}")
        if self.window is not None and self.chunk is not None:
            raise ValueError(f"a layer has a window or chunks, got window={self.window} and chunk={self.chunk}")
        for name in ("scale", "softcap", "k_scale", "v_scale"):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise ValueError(f"{name} must be positive or None, got {value}")
        for name in ("alibi_slopes", "sinks"):
            tensor = getattr(self, name)
            # Kernels read them as they are; a conversion a step would cost more than the attention of a decode.
            if tensor is not None and (str(tensor.dtype) != "torch.float32" or tensor.dim() != 1):
                raise ValueError(f"{name} must be float32 of shape [heads], got {tensor.dtype} {list(tensor.shape)}")

    def given(self) -> set[str]:
        """The names of the options that are not None, scales apart."""
        given = {field.name for field in fields(self) if getattr(self, field.name) is not None}
        return given - {"scale", "k_scale", "v_scale"}


class LayerKind(NamedTuple):
    """The options of a layer's attention; heads are this rank's."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    options: AttentionOptions
