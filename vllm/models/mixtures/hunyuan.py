"""Hunyuan's mixture (huggingface.co/tencent/Hunyuan-A13B-Instruct): norms of heads after the rotation, an MLP of an
expert's width that all tokens take."""

from __future__ import annotations

from vllm.models.checkpoint_names import CheckpointNames, split_experts
from vllm.models.config_reader import ConfigReader
from vllm.models.decoder import DecoderForCausalLM
from vllm.models.spec import DecoderSpec


class HunYuanMoEV1ForCausalLM(DecoderForCausalLM):
    names = CheckpointNames(
        (
            (r"\.self_attn\.query_layernorm\.", ".self_attn.q_norm."),
            (r"\.self_attn\.key_layernorm\.", ".self_attn.k_norm."),
            (r"\.mlp\.gate\.wg\.", ".mlp.gate."),
            (r"\.mlp\.shared_mlp\.", ".mlp.shared_experts."),
        ),
        (split_experts(),),
    )

    @classmethod
    def describe(cls, reader: ConfigReader) -> DecoderSpec:
        # Latent attention's, and what belongs to other heads and to pictures.
        reader.ignore("q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
        reader.ignore("attention_head_dim", "cla_share_factor", "class_num", "dense_list", "mask_init_id", "pool_type")
        reader.ignore("im_start_id", "im_end_id", "im_newline_id", "pad_id", "sep_id", "eod_id")
        reader.ignore("text_start_id", "text_end_id", "moe_intermediate_size", "routed_scaling_factor")
        reader.only("norm_type", "rms")
        for name in ("norm_topk_prob", "use_mixed_mlp_moe", "use_qk_norm", "use_rotary_pos_emb"):
            reader.only(name, True)
        reader.only("num_shared_expert", 1, [1] * reader.num_layers)
        norm = reader.norm(eps=1e-5)
        attention = reader.attention(qk_norm=norm, qk_norm_after_rotary=True)
        size = reader.integer("intermediate_size", default=11008)
        mixture = reader.mixture(size, 1, 1, renormalised=True, shared_size=size, router_is_float32=True)
        return reader.decoder(attention, mixture, norm)


class HYV3ForCausalLM(DecoderForCausalLM):
    """Hunyuan 3: norms of heads, sigmoids, an MLP in the first layer."""

    names = CheckpointNames(
        (
            (r"\.mlp\.router\.gate\.", ".mlp.gate."),
            (r"\.mlp\.(expert_bias|e_score_correction_bias)", ".mlp.gate.e_score_correction_bias"),
            (r"\.mlp\.shared_mlp\.", ".mlp.shared_experts."),
        ),
        (split_experts(),),
        has_further_layers=True,
    )

    @classmethod
    def describe(cls, reader: ConfigReader) -> DecoderSpec:
        # Whether the sum of the experts and the MLP is rounded once or twice.
        reader.ignore("enable_moe_fp32_combine")
        norm = reader.norm(eps=1e-5)
        head_dim = reader.head_dim_or(128)
        rotary = reader.rotary(head_dim, theta=11158840.0)
        size = reader.integer("moe_intermediate_size", default=1536)
        mlp = reader.mlp(size=13312)
        mixture = reader.mixture(
            size,
            192,
            8,
            scores="sigmoid",
            correction=True,
            renormalised=True,
            added_to_sum=1e-20,
            scale=reader.number("router_scaling_factor", default=2.826),
            shared_size=reader.count("num_shared_experts", default=1) * size,
            mlp_bias=mlp.up_bias,
            router_is_float32=True,
        )
        attention = reader.attention(head_dim=head_dim, rotary=rotary, qk_norm=norm)
        return reader.decoder(attention, reader.mixed(mixture, mlp, reader.first_dense(1)), norm)
