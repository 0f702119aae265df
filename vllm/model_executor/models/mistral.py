"""Mistral (arXiv:2310.06825): Llama whose layers may attend to a window."""

from __future__ import annotations

from vllm.model_executor.models.config_reader import ConfigReader
from vllm.model_executor.models.decoder import DecoderForCausalLM
from vllm.model_executor.models.spec import DecoderSpec


class MistralForCausalLM(DecoderForCausalLM):
    @classmethod
    def describe(cls, reader: ConfigReader) -> DecoderSpec:
        attention = reader.windowed(reader.attention(bias=False), default_window=4096)
        return reader.decoder(attention, reader.mlp(bias=False), reader.norm())
