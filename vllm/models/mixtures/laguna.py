"""Laguna (huggingface.co/poolside): gated heads, whose number differs by layer, and rotary positions of each kind of
layers."""

from __future__ import annotations

from dataclasses import replace

from vllm.models.checkpoint_names import CheckpointNames, split_experts
from vllm.models.config_reader import ConfigReader
from vllm.models.decoder import DecoderForCausalLM
from vllm.models.spec import DecoderSpec


class LagunaForCausalLM(DecoderForCausalLM):
    names = CheckpointNames(
        (
            (r"\.self_attn\.g_proj\.", ".self_attn.gate_proj."),
            (r"\.mlp\.experts\.e_score_correction_bias", ".mlp.gate.e_score_correction_bias"),
            (r"\.mlp\.shared_expert\.", ".mlp.shared_experts."),
        ),
        (split_experts(),),
    )

    @classmethod
    def describe(cls, reader: ConfigReader) -> DecoderSpec:
        reader.need("rope_parameters")
        norm = reader.norm()
        gating = reader.get("gating", default=True)
        attention = reader.attention(
            head_dim=reader.head_dim_or(128),
            rotary=False,
            qk_norm=norm,
            output_gate="softplus",
            gate_per_head=gating is True or gating == "per-head",
        )
        kinds = ["full_attention"] * reader.num_layers
        layers = reader.by_kind(attention, kinds, 512, partial=1.0)
        heads = reader.get("num_attention_heads_per_layer", default=[reader.num_heads] * reader.num_layers)
        kv_heads = attention.num_kv_heads
        if not isinstance(heads, list) or len(heads) != reader.num_layers or any(each % kv_heads for each in heads):
            problem = f"it must have a multiple of {kv_heads} for each of {reader.num_layers} layers"
            raise reader.refuse("num_attention_heads_per_layer", problem)
        mixture = reader.mixture(
            reader.integer("moe_intermediate_size", default=512),
            256,
            8,
            scores="sigmoid",
            correction=True,
            renormalised=True,
            scale=reader.number("moe_routed_scaling_factor", default=1.0),
            softcap=reader.number("moe_router_logit_softcapping", default=0.0),
            shared_size=reader.integer("shared_expert_intermediate_size", default=512),
        )
        mlps = reader.mixed(mixture, reader.mlp(bias=False, size=8192), reader.first_dense(1))
        layers = tuple(replace(layer, num_heads=count) for layer, count in zip(layers, heads, strict=True))
        return reader.decoder(layers, mlps, norm)
