"""AFMoE (huggingface.co/arcee-ai/Trinity-Mini): gated heads, positions in layers with a window alone, norms before and
after."""

from __future__ import annotations

from vllm.models.checkpoint_names import CheckpointNames, split_experts
from vllm.models.config_reader import ConfigReader
from vllm.models.decoder import DecoderForCausalLM
from vllm.models.spec import DecoderSpec, rotating_in_windows


class AfmoeForCausalLM(DecoderForCausalLM):
    names = CheckpointNames(
        (
            (r"\.post_attention_layernorm\.", ".attention_output_norm."),
            (r"\.pre_mlp_layernorm\.", ".post_attention_layernorm."),
            (r"\.post_mlp_layernorm\.", ".mlp_output_norm."),
            (r"\.mlp\.router\.gate\.", ".mlp.gate."),
            (r"\.mlp\.expert_bias", ".mlp.gate.e_score_correction_bias"),
        ),
        (split_experts(),),
    )

    @classmethod
    def describe(cls, reader: ConfigReader) -> DecoderSpec:
        reader.ignore("load_balance_coeff", "use_grouped_mm")
        if reader.get("score_func", default="sigmoid") != "sigmoid" or not reader.boolean("route_norm", default=True):
            raise reader.refuse("score_func", "it must be sigmoid, with route_norm")
        norm = reader.norm(eps=1e-5)
        head_dim = reader.head_dim_or(128)
        attention = reader.attention(head_dim=head_dim, qk_norm=norm, output_gate="sigmoid")
        kinds = reader.every_nth_full(reader.integer("global_attn_every_n_layers", default=4))
        layers = rotating_in_windows(reader.windowed(attention, default_window=1024, default_kinds=kinds))
        size = reader.integer("moe_intermediate_size", default=1408)
        mixture = reader.mixture(
            size,
            64,
            6,
            scores="sigmoid",
            correction=True,
            renormalised=True,
            added_to_sum=1e-20,
            scale=reader.number("route_scale", default=1.0),
            shared_size=reader.count("num_shared_experts", default=2) * size,
        )
        dense = reader.first_dense(reader.count("num_dense_layers", default=1))
        mlps = reader.mixed(mixture, reader.mlp(bias=False, size=6144), dense)
        scale = reader.hidden_size**0.5 if reader.boolean("mup_enabled", default=False) else 1.0
        return reader.decoder(layers, mlps, norm, block="both", embedding_scale=scale, scales_given=True)
