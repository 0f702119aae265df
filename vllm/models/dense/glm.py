"""GLM-4-9B (arXiv:2406.12793) and GLM-4-0414: partial interleaved rotary positions, fused gate and up; the latter with
norms before and after."""

from __future__ import annotations

from dataclasses import replace

from vllm.models.checkpoint_names import CheckpointNames, split_gate_up
from vllm.models.config_reader import ConfigReader
from vllm.models.decoder import DecoderForCausalLM
from vllm.models.spec import DecoderSpec


class GlmForCausalLM(DecoderForCausalLM):
    names = CheckpointNames(transforms=(split_gate_up,))

    @classmethod
    def describe(cls, reader: ConfigReader) -> DecoderSpec:
        head_dim = reader.head_dim_or(128)
        rotary = reader.rotary(head_dim, partial=0.5, interleaved=True)
        bias = reader.boolean("attention_bias", default=True)
        attention = reader.attention(head_dim=head_dim, bias=False, qkv_bias=bias, rotary=rotary)
        return reader.decoder(attention, reader.mlp(bias=False), reader.norm(eps=1.5625e-7))


class Glm4ForCausalLM(GlmForCausalLM):
    names = CheckpointNames(
        (
            (r"\.post_self_attn_layernorm\.", ".attention_output_norm."),
            (r"\.post_mlp_layernorm\.", ".mlp_output_norm."),
        ),
        (split_gate_up,),
    )

    @classmethod
    def describe(cls, reader: ConfigReader) -> DecoderSpec:
        return replace(super().describe(reader), block="both")
