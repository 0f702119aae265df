"""MiMo V2 Flash (huggingface.co/XiaomiMiMo/MiMo-V2-Flash): layers with a window have twice the key heads, and sinks;
values have another width than keys."""

from __future__ import annotations

import re
from dataclasses import replace

import torch
from torch import Tensor

from vllm.config.checkpoint.config import RopeConfig
from vllm.models.checkpoint_names import CheckpointNames, Parts, split_experts
from vllm.models.config_reader import ConfigReader
from vllm.models.decoder import DecoderForCausalLM
from vllm.models.mixtures.deepseek import deepseek_mixture
from vllm.models.prediction_layers import MIMO_V2
from vllm.models.spec import AttentionSpec, DecoderSpec, RotarySpec

_PROJECTION = re.compile(r"model\.layers\.(\d+)\.self_attn\.([qkvo])_proj\.(weight|bias)")


def _of_one_width(name: str, tensor: Tensor, spec: DecoderSpec) -> Parts:
    """Queries, keys and values have one width here: zeros follow the narrower ones, and the output projection's columns
    of such values are zeros."""
    found = _PROJECTION.fullmatch(name)
    if found is not None:
        layer = spec.attentions[int(found[1])]
        heads = layer.num_kv_heads if found[2] in "kv" else layer.num_heads
        dim = int(found[2] == "o")
        if tensor.dim() <= dim:
            # The rows' numbers of a quantised weight, whose columns change: it is read as its values.
            yield name, tensor[:0]
            return
        parts = tensor.unflatten(dim, (heads, -1))
        if found[2] == "v":
            # Not rounded to the dtype of the file.
            parts = parts.float() * layer.value_scale
        shape = list(parts.shape)
        shape[dim + 1] = layer.head_dim - shape[dim + 1]
        tensor = torch.cat((parts, parts.new_zeros(shape)), dim + 1).flatten(dim, dim + 1)
    yield name, tensor


class MiMoV2FlashForCausalLM(DecoderForCausalLM):
    names = CheckpointNames(
        ((r"\.attention_sink_bias$", ".sinks"),), (split_experts(), _of_one_width), ignored=r"model\.mtp\..*"
    )
    prediction = MIMO_V2

    @classmethod
    def describe(cls, reader: ConfigReader) -> DecoderSpec:
        head_dim = reader.head_dim_or(192)
        value_dim = reader.integer("v_head_dim", default=128)
        bias = reader.boolean("attention_bias", default=False)
        attention = reader.attention(
            head_dim=max(head_dim, value_dim),
            rotary=False,
            bias=False,
            qkv_bias=bias,
            scale=head_dim**-0.5,
            value_scale=reader.number("attention_value_scale", default=0.707),
        )
        _check_published(reader, attention, head_dim, value_dim)
        flags = reader.get("hybrid_layer_pattern") or [int(i > 0 and (i + 1) % 6 > 0) for i in range(reader.num_layers)]
        kinds = ["sliding_attention" if flag else "full_attention" for flag in flags]
        layers = reader.windowed(attention, 129, default_kinds=kinds)
        if tokens := reader.get("sliding_window_size"):
            # The file counts the tokens before a token, and not itself.
            layers = tuple(layer if layer.window is None else replace(layer, window=tokens + 1) for layer in layers)
        layers = tuple(
            replace(layer, rotary=_rotary(reader, head_dim, "full_attention", "rope_theta", 5e6))
            if layer.window is None
            else replace(
                layer,
                rotary=_rotary(reader, head_dim, "sliding_attention", "swa_rope_theta", 1e4),
                num_kv_heads=2 * layer.num_kv_heads,
                sinks=True,
            )
            for layer in layers
        )
        mixture = deepseek_mixture(reader, 2048, 256, 8, router_is_float32=True)
        flags = reader.get("moe_layer_freq") or [int(i > 0) for i in range(reader.num_layers)]
        dense = ["sparse" if flag else "dense" for flag in flags]
        mlps = reader.mixed(mixture, reader.mlp(bias=False, size=16384), dense)
        return reader.decoder(layers, mlps, reader.norm(eps=1e-5))


def _check_published(reader: ConfigReader, attention: AttentionSpec, head_dim: int, value_dim: int) -> None:
    """The published file says of layers with a window what transformers' configuration implies. ValueError: it says
    something else."""
    implied = {
        "swa_num_attention_heads": attention.num_heads,
        "swa_num_key_value_heads": 2 * attention.num_kv_heads,
        "swa_head_dim": head_dim,
        "swa_v_head_dim": value_dim,
        "add_swa_attention_sink_bias": True,
        "add_full_attention_sink_bias": False,
    }
    for name, wanted in implied.items():
        if reader.get(name, default=wanted) != wanted:
            raise reader.refuse(name, f"it must be {wanted}")
    # Windows are not cut into chunks of this.
    reader.ignore("attention_chunk_size", "hybrid_block_size", "attention_projection_layout")


def _rotary(reader: ConfigReader, head_dim: int, kind: str, theta: str, default: float) -> RotarySpec:
    """Rotary positions of layers of a kind, by rope_parameters or the published file's names."""
    base, share = reader.number(theta, default=default), reader.number("partial_rotary_factor", default=0.334)
    if reader.get("rope_parameters") is None:
        return RotarySpec(int(head_dim * share), RopeConfig("default", base))
    return reader.rotary(head_dim, kind=kind, partial=0.334)
