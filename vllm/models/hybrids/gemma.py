"""RecurrentGemma (arXiv:2404.07839): Griffin's recurrent blocks, and attention with a window in every third layer."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from vllm.models.checkpoint_names import CheckpointNames, Parts
from vllm.models.config_reader import ConfigReader
from vllm.models.decoder import DecoderForCausalLM
from vllm.models.hybrids.weights import WITH_PREFIX, conv_parts, spec_of
from vllm.models.spec import AnyMixer, DecoderSpec
from vllm.models.states.specs import RgLruSpec

_RENAMES = (
    WITH_PREFIX,
    (r"\.temporal_block\.conv_1d\.", ".self_attn.conv."),
    (r"\.temporal_block\.(rg_lru\.)?", ".self_attn."),
    (r"\.mlp_block\.", ".mlp."),
    (r"\.temporal_pre_norm\.", ".input_layernorm."),
    (r"\.channel_pre_norm\.", ".post_attention_layernorm."),
    (r"(^|\.)final_norm\.", r"\1norm."),
)


def _gates(name: str, tensor: Tensor, spec: DecoderSpec) -> Parts:
    """Gates' weights [heads, inputs, outputs], and biases [heads, outputs]; the convolution."""
    layer = spec_of(RgLruSpec, spec)
    if name.endswith("_gate_weight"):
        yield name.replace("_gate_weight", "_gate.weight"), tensor.transpose(1, 2).flatten(0, 1)
    elif name.endswith("_gate_bias"):
        yield name, tensor.flatten()
    else:
        yield from conv_parts(name, tensor, (("x", layer.heads * layer.width),))


class RecurrentGemmaForCausalLM(DecoderForCausalLM):
    names = CheckpointNames(_RENAMES, (_gates,))

    @classmethod
    def describe(cls, reader: ConfigReader) -> DecoderSpec:
        reader.ignore("w_init_variance_scale", "final_w_init_variance_scale", "layer_types", "layers_block_type")
        reader.only("embeddings_scale_by_sqrt_dim", True)
        head_dim = reader.hidden_size // reader.num_heads
        reader.only("head_dim", head_dim)
        attention = reader.attention(
            head_dim=head_dim,
            rotary=reader.rotary(head_dim, partial=0.5),
            o_bias=True,
            window=reader.integer("attention_window_size", "sliding_window", default=2048),
        )
        mlp = reader.mlp("gelu_pytorch_tanh", True, ("hidden_activation",), size=7680)
        width = reader.integer("lru_width", default=reader.hidden_size)
        if width % reader.num_heads:
            raise reader.refuse("lru_width", f"it must be a multiple of num_attention_heads={reader.num_heads}")
        taps = reader.integer("conv1d_width", default=4)
        recurrent = RgLruSpec(reader.num_heads, width // reader.num_heads, taps, mlp.activation)
        pattern = reader.get("block_types", "_block_types", default=["recurrent", "recurrent", "attention"])
        if not isinstance(pattern, list) or not pattern or set(pattern) - {"recurrent", "attention"}:
            raise reader.refuse("block_types", "it must name recurrent or attention")
        kinds = [pattern[index % len(pattern)] for index in range(reader.num_layers)]
        layers: list[AnyMixer] = [recurrent if kind == "recurrent" else attention for kind in kinds]
        return reader.decoder(
            layers,
            type(mlp)(mlp.intermediate_size // 2, mlp.activation, up_bias=True, down_bias=True),
            reader.norm(offset=1.0),
            tied=True,
            # As rounded as the model has it.
            embedding_scale=float(torch.tensor(math.sqrt(reader.hidden_size)).bfloat16()),
            scales_given=True,
            logits_softcap=reader.optional_number("logits_soft_cap", default=30.0),
            max_positions=reader.integer("max_position_embeddings", default=8192),
        )
