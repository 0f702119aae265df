"""Bailing hybrid (Ling 3): Kimi's linear attention in most layers, gated latent attention in the others, and DeepSeek
V3's mixture."""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor

from vllm.models.checkpoint_names import CheckpointNames, Parts, split_experts
from vllm.models.config_reader import ConfigReader
from vllm.models.decoder import DecoderForCausalLM
from vllm.models.hybrids.kimi import own_names
from vllm.models.hybrids.weights import WITH_PREFIX, split_delta_conv
from vllm.models.latent_options import read_latent_attention
from vllm.models.mixtures.deepseek import deepseek_mixture
from vllm.models.spec import AnyMixer, DecoderSpec
from vllm.models.states.specs import ChannelDeltaSpec

_RENAMES = (
    WITH_PREFIX,
    (r"^model\.word_embeddings\.", "model.embed_tokens."),
    (r"\.attention\.", ".self_attn."),
    (r"\.self_attn\.dense\.", ".self_attn.o_proj."),
    (r"\.self_attn\.(forget_gate\.)?(A_log|dt_bias)$", r".self_attn.decays.\2"),
    (r"\.self_attn\.(forget_gate\.)?f_proj\.", ".self_attn.f_a_proj."),
    (r"\.self_attn\.conv1d\.", ".self_attn.conv."),
    (r"\.self_attn\.o_norm\.", ".self_attn.norm."),
    (r"\.mlp\.gate\.expert_bias", ".mlp.gate.e_score_correction_bias"),
)


def _gates(name: str, tensor: Tensor, spec: DecoderSpec) -> Parts:
    """g_proj, which gates what either kind of attention gives."""
    if name.endswith(".self_attn.g_proj.weight"):
        layer = int(name.removeprefix("model.layers.").partition(".")[0])
        is_linear = isinstance(spec.layers[layer], ChannelDeltaSpec)
        name = name.replace(".g_proj.", ".g_a_proj." if is_linear else ".gate_proj.")
    yield name, tensor


class BailingHybridForCausalLM(DecoderForCausalLM):
    names = CheckpointNames(_RENAMES, (split_delta_conv, own_names, _gates, split_experts()), has_further_layers=True)

    @classmethod
    def describe(cls, reader: ConfigReader) -> DecoderSpec:
        reader.ignore("num_mtp_layers", "num_nextn_predict_layers", "mtp_loss_scaling_factor", "linear_num_heads")
        reader.only("hidden_act", "silu")
        reader.only("moe_router_activation_func", "sigmoid")
        every = reader.integer("layer_group_size", default=6)
        default = ["linear_attention" if (i + 1) % every else "full_attention" for i in range(reader.num_layers)]
        kinds = reader.kinds("layer_types", default, "linear_attention", "full_attention")
        bound = reader.number("kda_lower_bound", default=-5.0)
        delta = ChannelDeltaSpec(
            heads=reader.num_heads,
            head_dim=reader.integer("linear_head_dim", "head_dim", default=128),
            kernel_size=reader.integer("linear_conv_kernel_dim", "short_conv_kernel_size", default=4),
            norm_eps=reader.norm().eps,
            low_rank=False,
            bound=bound if reader.boolean("kda_safe_gate", default=True) else 0.0,
        )
        attention = read_latent_attention(reader, interleaved=True, value_dim=128)
        rotary = reader.rotary(attention.rope_dim, reader.boolean("rope_interleave", default=True), theta=6000000.0)
        if rotary.rope.params.get("original_max_position_embeddings", 0) is None:
            raise reader.refuse("rope_parameters", "it must have original_max_position_embeddings")
        attention = replace(attention, rotary=rotary, output_gate=True)
        layers: list[AnyMixer] = [delta if kind == "linear_attention" else attention for kind in kinds]
        size = reader.integer("moe_intermediate_size", default=768)
        mixture = deepseek_mixture(
            reader,
            768,
            512,
            8,
            groups=(8, 4),
            shared_size=reader.count("n_shared_experts", "num_shared_experts", default=1) * size,
            renormalised=reader.boolean("norm_topk_prob", "moe_renormalize", default=True),
            scale=2.5,
            router_is_float32=True,
        )
        dense = reader.first_dense(reader.count("first_k_dense_replace", default=2))
        mlps = reader.mixed(mixture, reader.mlp(bias=False, size=6144), dense)
        context = reader.integer("max_position_embeddings", "model_max_length", default=262144)
        return reader.decoder(layers, mlps, reader.norm(), max_positions=context)
