"""Seed-OSS (huggingface.co/ByteDance-Seed/Seed-OSS-36B-Instruct): Llama with a bias on queries, keys and values."""

from __future__ import annotations

from vllm.models.config_reader import ConfigReader
from vllm.models.decoder import DecoderForCausalLM
from vllm.models.spec import DecoderSpec


class SeedOssForCausalLM(DecoderForCausalLM):
    @classmethod
    def describe(cls, reader: ConfigReader) -> DecoderSpec:
        attention = reader.attention(
            head_dim=reader.head_dim_or(128),
            bias=False,
            qkv_bias=reader.boolean("attention_bias", default=True),
            o_bias=reader.boolean("attention_out_bias", default=False),
        )
        return reader.decoder(attention, reader.mlp(), reader.norm())
