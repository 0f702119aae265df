"""Kimi Linear (arXiv:2510.26692): linear attention in most layers, latent attention without positions in the others,
and DeepSeek V3's mixture."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from vllm.models.checkpoint_names import BLOCK_SPARSE, CheckpointNames, Parts, split_experts
from vllm.models.config_reader import ConfigReader
from vllm.models.decoder import DecoderForCausalLM
from vllm.models.hybrids.weights import WITH_PREFIX, split_delta_conv
from vllm.models.mixtures.deepseek import deepseek_mixture
from vllm.models.spec import AnyMixer, DecoderSpec, LatentAttentionSpec, NormSpec
from vllm.models.states.specs import ChannelDeltaSpec

_RENAMES = (
    WITH_PREFIX,
    *BLOCK_SPARSE,
    (r"\.self_attn\.(forget_gate\.)?(A_log|dt_bias)$", r".self_attn.decays.\2"),
    (r"\.self_attn\.forget_gate\.", ".self_attn."),
    (r"\.self_attn\.conv1d\.", ".self_attn.conv."),
    (r"\.self_attn\.o_norm\.", ".self_attn.norm."),
)


def own_names(name: str, tensor: Tensor, spec: DecoderSpec) -> Parts:
    """Linear attention's o_proj and A_log [1, 1, heads, 1] by our names."""
    if name.endswith(".decays.A_log"):
        tensor = tensor.flatten()
    if name.endswith(".self_attn.o_proj.weight"):
        layer = int(name.removeprefix("model.layers.").partition(".")[0])
        if isinstance(spec.layers[layer], ChannelDeltaSpec):
            name = name.replace(".o_proj.", ".out_proj.")
    yield name, tensor


class KimiLinearForCausalLM(DecoderForCausalLM):
    names = CheckpointNames(_RENAMES, (split_delta_conv, own_names, split_experts()), has_further_layers=True)

    @classmethod
    def describe(cls, reader: ConfigReader) -> DecoderSpec:
        linear = reader.get("linear_attn_config", default={})
        kinds = _kinds(reader, linear)
        delta = ChannelDeltaSpec(
            heads=_size(reader, linear, "num_heads", "linear_num_heads", 32),
            head_dim=_size(reader, linear, "head_dim", "linear_head_dim", 128),
            kernel_size=_size(reader, linear, "short_conv_kernel_size", "linear_conv_kernel_dim", 4),
            norm_eps=reader.norm(eps=1e-5).eps,
        )
        attention = _attention(reader)
        layers: list[AnyMixer] = [delta if kind == "linear_attention" else attention for kind in kinds]
        reader.only("hidden_act", "silu")
        reader.only("moe_router_activation_func", "sigmoid")
        reader.only("moe_layer_freq", 1)
        reader.ignore("use_grouped_topk", "num_nextn_predict_layers")
        mixture = deepseek_mixture(
            reader,
            1024,
            256,
            8,
            shared_size=reader.count("n_shared_experts", "num_shared_experts", default=1)
            * reader.integer("moe_intermediate_size", default=1024),
            renormalised=reader.boolean("norm_topk_prob", "moe_renormalize", default=True),
            scale=2.446,
            router_is_float32=True,
        )
        dense = reader.first_dense(reader.count("first_k_dense_replace", default=1))
        mlps = reader.mixed(mixture, reader.mlp(bias=False, size=9216), dense)
        context = reader.integer("max_position_embeddings", "model_max_length", default=1048576)
        return reader.decoder(layers, mlps, reader.norm(eps=1e-5), max_positions=context)


def _size(reader: ConfigReader, linear: dict[str, Any], own: str, name: str, default: int) -> int:
    """A size of linear attention, by the option of its own part of config.json or of the whole."""
    return reader.integer(name, default=linear.get(own, default))


def _kinds(reader: ConfigReader, linear: dict[str, Any]) -> list[str]:
    count = reader.num_layers
    default = ["full_attention" if index and index % 4 == 0 else "linear_attention" for index in range(count)]
    if "full_attn_layers" in linear:
        # The first one is number 1.
        with_attention = linear["full_attn_layers"]
        default = ["full_attention" if index + 1 in with_attention else "linear_attention" for index in range(count)]
    return reader.kinds("layer_types", default, "linear_attention", "full_attention")


def _attention(reader: ConfigReader) -> LatentAttentionSpec:
    reader.only("mla_use_nope", True)
    reader.ignore("head_dim", "qk_head_dim", "rope_parameters", "rope_theta", "rope_scaling")
    nope, rope = reader.integer("qk_nope_head_dim", default=128), reader.integer("qk_rope_head_dim", default=64)
    if reader.integer("num_key_value_heads", default=reader.num_heads) != reader.num_heads:
        raise reader.refuse("num_key_value_heads", f"latent attention has as many as heads, {reader.num_heads}")
    return LatentAttentionSpec(
        num_heads=reader.num_heads,
        nope_dim=nope,
        rope_dim=rope,
        value_dim=reader.integer("v_head_dim", default=128),
        latent_dim=reader.integer("kv_lora_rank", default=512),
        query_dim=None if reader.get("q_lora_rank") is None else reader.integer("q_lora_rank"),
        rotary=None,
        scale=(nope + rope) ** -0.5,
        # A constant, whatever rms_norm_eps is.
        norm=NormSpec("rms", 1e-6),
        bias=reader.boolean("attention_bias", default=False),
    )
