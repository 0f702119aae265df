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
        norm = reader.norm(eps=1e-5)
        attention = reader.attention(qk_norm=norm, qk_norm_after_rotary=True)
        size = reader.integer("intermediate_size", default=11008)
        mixture = reader.mixture(size, 1, 1, renormalised=True, shared_size=size, router_is_float32=True)
        return reader.decoder(attention, mixture, norm)
