"""Persimmon (adept.ai/blog/persimmon-8b): LayerNorm of heads, squared ReLU, partial rotary positions."""

from __future__ import annotations

from vllm.models.checkpoint_names import MEGATRON, QK_LAYERNORMS, CheckpointNames, split_grouped_qkv
from vllm.models.config_reader import ConfigReader
from vllm.models.decoder import DecoderForCausalLM
from vllm.models.spec import DecoderSpec


class PersimmonForCausalLM(DecoderForCausalLM):
    names = CheckpointNames(
        (
            *MEGATRON,
            *QK_LAYERNORMS,
            (r"^(model\.)?final_layernorm\.", "model.norm."),
        ),
        (split_grouped_qkv,),
    )

    @classmethod
    def describe(cls, reader: ConfigReader) -> DecoderSpec:
        norm = reader.layer_norm()
        qk_norm = norm if reader.boolean("qk_layernorm", default=True) else None
        attention = reader.attention(bias=True, rotary=reader.rotary(reader.head_dim, partial=0.5), qk_norm=qk_norm)
        return reader.decoder(attention, reader.mlp("relu2", bias=True, gated=False), norm)
