"""From hybrids' checkpoints to the tensors of `states/`: parts of stacked projections and convolutions."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import TypeVar

from torch import Tensor

from vllm.models.checkpoint_names import Parts
from vllm.models.spec import DecoderSpec, DeltaRuleSpec, StateSpec

S = TypeVar("S", bound=StateSpec)
_CONV = re.compile(r"(.+\.conv)\.(weight|bias)")


def spec_of(kind: type[S], spec: DecoderSpec) -> S:
    """Of the layers with a state of this kind, which are alike."""
    return next(layer for layer in spec.layers if isinstance(layer, kind))


def delta_rule_of(spec: DecoderSpec) -> DeltaRuleSpec:
    """Of the layers with linear attention."""
    return spec_of(DeltaRuleSpec, spec)


def conv_parts(name: str, tensor: Tensor, sizes: Iterable[tuple[str, int]]) -> Parts:
    """The convolution's weight [channels, 1, taps] as [taps, channels] of each part, and its bias; other tensors as
    they are."""
    match = _CONV.fullmatch(name)
    if match is None:
        yield name, tensor
        return
    names, widths = zip(*sizes, strict=True)
    for part, rows in zip(names, tensor.split(widths), strict=True):
        yield f"{match[1]}.{part}.{match[2]}", rows.squeeze(1).t() if match[2] == "weight" else rows


def split_delta_conv(name: str, tensor: Tensor, spec: DecoderSpec) -> Parts:
    """The convolution of queries, keys and values."""
    layer = delta_rule_of(spec)
    keys = layer.key_heads * layer.key_dim
    yield from conv_parts(name, tensor, (("q", keys), ("k", keys), ("v", layer.heads * layer.value_dim)))
