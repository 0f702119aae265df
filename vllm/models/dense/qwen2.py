"""Qwen1.5, Qwen2 and Qwen2.5 (arXiv:2407.10671): Llama with a bias on queries, keys and values."""

from __future__ import annotations

from vllm.models.config_reader import ConfigReader
from vllm.models.decoder import DecoderForCausalLM
from vllm.models.spec import DecoderSpec


class Qwen2ForCausalLM(DecoderForCausalLM):
    @classmethod
    def describe(cls, reader: ConfigReader) -> DecoderSpec:
        attention = reader.attention(bias=False, qkv_bias=True)
        return reader.decoder(reader.windowed(attention, switch="use_sliding_window"), reader.mlp(), reader.norm())
