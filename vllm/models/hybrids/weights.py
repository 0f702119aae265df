"""From hybrids' checkpoints to the tensors of `states/`: parts of stacked projections and convolutions."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import TypeVar

from torch import Tensor

from vllm.models.checkpoint_names import Parts
from vllm.models.spec import BesideSpec, DecoderSpec, StateSpec
from vllm.models.states.specs import ChannelDeltaSpec, DeltaRuleSpec, Mamba2Spec, MambaSpec

S = TypeVar("S", bound=StateSpec)
_IN_PROJ = re.compile(r"(.+)\.in_proj\.(weight|bias)")
_SINGLE_CONV = re.compile(r"(.+)\.([qkv])_conv1d\.weight")
_CONV = re.compile(r"(.+\.conv)\.(weight|bias)")

# A model without a head has names that lack the prefix.
WITH_PREFIX = (r"^layers\.", "model.layers.")
# Some models are called a backbone.
BACKBONE = (
    (r"^(backbone\.|model\.)?embeddings?\.", "model.embed_tokens."),
    (r"^(backbone\.|model\.)?norm_f\.", "model.norm."),
    (r"^(backbone\.)?layers\.", "model.layers."),
)
# Mamba 1 and 2 have these names in layers where they stand beside attention.
MAMBA_RENAMES = (
    (r"\.mamba\.conv1d\.", ".self_attn.conv."),
    (r"\.mamba\.(A_log|dt_bias|D)$", r".self_attn.decays.\1"),
    (r"\.mamba\.dt_proj\.bias$", ".self_attn.decays.dt_bias"),
    (r"\.mamba\.x_proj\.", ".self_attn.inputs_proj."),
    *((rf"\.mamba\.{part}_layernorm\.", f".self_attn.norms.{i}.") for i, part in enumerate(("dt", "b", "c"))),
    (r"\.mamba\.", ".self_attn."),
)


def spec_of(kind: type[S], spec: DecoderSpec) -> S:
    """The spec of the layers with a state of this kind, which are alike."""
    layers = (layer.state if isinstance(layer, BesideSpec) else layer for layer in spec.layers)
    return next(layer for layer in layers if isinstance(layer, kind))


def delta_rule_of(spec: DecoderSpec) -> DeltaRuleSpec:
    """The spec of the layers with linear attention."""
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
    """The convolution of queries, keys and values, or those of each."""
    single = _SINGLE_CONV.fullmatch(name)
    if single is not None:
        yield f"{single[1]}.conv.{single[2]}.weight", tensor.squeeze(1).t()
        return
    if _CONV.fullmatch(name) is None:
        yield name, tensor
        return
    layer = next(layer for layer in spec.layers if isinstance(layer, DeltaRuleSpec | ChannelDeltaSpec))
    if isinstance(layer, DeltaRuleSpec):
        keys, values = layer.key_heads * layer.key_dim, layer.heads * layer.value_dim
    else:
        keys = values = layer.heads * layer.head_dim
    yield from conv_parts(name, tensor, (("q", keys), ("k", keys), ("v", values)))


def split_mamba2(name: str, tensor: Tensor, spec: DecoderSpec) -> Parts:
    """Mamba 2's in_proj, which has gates, x, B, C and steps one after another, and its convolution of x, B and C."""
    layer = spec_of(Mamba2Spec, spec)
    inner, shared = layer.heads * layer.head_dim, layer.groups * layer.state_dim
    convolved = {"x": inner, "b": shared, "c": shared}
    match = _IN_PROJ.fullmatch(name)
    if match is None:
        yield from conv_parts(name, tensor, convolved.items())
        return
    parts = {"z": inner} | convolved | {"dt": layer.heads}
    for part, rows in zip(parts, tensor.split(list(parts.values())), strict=True):
        yield f"{match[1]}.{part}_proj.{match[2]}", rows


def split_mamba(name: str, tensor: Tensor, spec: DecoderSpec) -> Parts:
    """Mamba 1's in_proj, which has x, then gates, its convolution, and A_log [channels, values]."""
    channels = spec_of(MambaSpec, spec).channels
    match = _IN_PROJ.fullmatch(name)
    if match is not None:
        for part, rows in zip("xz", tensor.split(channels), strict=True):
            yield f"{match[1]}.{part}_proj.{match[2]}", rows
    elif name.endswith(".decays.A_log"):
        yield name, tensor.t()
    else:
        yield from conv_parts(name, tensor, (("x", channels),))
