"""Kolibri 1: norms before and after and of heads, positions in layers with a window alone, sigmoids of the chosen
logits."""

from __future__ import annotations

from vllm.models.checkpoint_names import CheckpointNames, split_experts
from vllm.models.config_reader import ConfigReader
from vllm.models.decoder import DecoderForCausalLM
from vllm.models.spec import DecoderSpec, rotating_in_windows


class Kolibri1ForCausalLM(DecoderForCausalLM):
    names = CheckpointNames(
        (
            (r"\.post_(self_attn_layernorm|attn_norm)\.", ".attention_output_norm."),
            (r"\.post_(mlp_layernorm|ffn_norm)\.", ".mlp_output_norm."),
            (r"\.moe\.router\.expert_bias", ".mlp.gate.e_score_correction_bias"),
        ),
        (split_experts(),),
    )

    @classmethod
    def describe(cls, reader: ConfigReader) -> DecoderSpec:
        norm = reader.norm()
        attention = reader.attention(head_dim=reader.head_dim_or(128), bias=False, qk_norm=norm)
        layers = reader.windowed(attention, default_window=513, default_kinds=reader.every_nth_full(5))
        if reader.config.raw.get("sliding_window", 513) is not None:
            layers = rotating_in_windows(layers)
        mixture = reader.mixture(
            reader.integer("moe_intermediate_size", default=512),
            384,
            6,
            scores="sigmoid",
            compares_logits=True,
            correction=True,
            renormalised=reader.boolean("norm_topk_prob", default=False),
            shared_size=reader.integer("shared_expert_intermediate_size", default=512),
        )
        return reader.decoder(layers, mixture, norm, block="both")
