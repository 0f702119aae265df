"""Qwen3 (arXiv:2505.09388): Llama with each head's query and key normalised before they are rotated."""

from __future__ import annotations

from vllm.models.config_reader import ConfigReader
from vllm.models.decoder import DecoderForCausalLM
from vllm.models.spec import DecoderSpec


class Qwen3ForCausalLM(DecoderForCausalLM):
    @classmethod
    def describe(cls, reader: ConfigReader) -> DecoderSpec:
        head_dim = reader.integer("head_dim", default=128)
        attention = reader.attention(head_dim=head_dim, qk_norm=reader.norm())
        return reader.decoder(reader.windowed(attention, switch="use_sliding_window"), reader.mlp(), reader.norm())
