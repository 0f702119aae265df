"""Persimmon (adept.ai/blog/persimmon-8b): LayerNorm of heads, squared ReLU, partial rotary positions."""

from __future__ import annotations

from vllm.models.checkpoint_names import CheckpointNames, split_grouped_qkv
from vllm.models.config_reader import ConfigReader
from vllm.models.decoder import DecoderForCausalLM
from vllm.models.spec import DecoderSpec


class PersimmonForCausalLM(DecoderForCausalLM):
    names = CheckpointNames(
        (
            (r"\.self_attn\.query_key_value\.", ".self_attn.qkv_proj."),
            (r"\.self_attn\.dense\.", ".self_attn.o_proj."),
            (r"\.self_attn\.([qk])_layernorm\.", r".self_attn.\1_norm."),
            (r"\.mlp\.dense_h_to_4h\.", ".mlp.up_proj."),
            (r"\.mlp\.dense_4h_to_h\.", ".mlp.down_proj."),
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
