"""Hunyuan, dense (huggingface.co/tencent/Hunyuan-7B-Instruct): Llama with norms of heads after the rotation."""

from __future__ import annotations

from vllm.model_executor.models.checkpoint_names import CheckpointNames
from vllm.model_executor.models.config_reader import ConfigReader
from vllm.model_executor.models.decoder import DecoderForCausalLM
from vllm.model_executor.models.spec import DecoderSpec


class HunYuanDenseV1ForCausalLM(DecoderForCausalLM):
    names = CheckpointNames(
        (
            (r"\.self_attn\.query_layernorm\.", ".self_attn.q_norm."),
            (r"\.self_attn\.key_layernorm\.", ".self_attn.k_norm."),
        )
    )

    @classmethod
    def describe(cls, reader: ConfigReader) -> DecoderSpec:
        norm = reader.norm(eps=1e-5)
        attention = reader.attention(qk_norm=norm, qk_norm_after_rotary=True)
        return reader.decoder(attention, reader.mlp(bias=False), norm)
