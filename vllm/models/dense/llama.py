"""Llama (arXiv:2302.13971): pre-norm blocks, rotary positions, grouped-query attention, gated MLP. Also SmolLM2, Yi,
Vicuna, and the dense DeepSeek models."""

from __future__ import annotations

from vllm.models.config_reader import ConfigReader
from vllm.models.decoder import DecoderForCausalLM
from vllm.models.spec import DecoderSpec


class LlamaForCausalLM(DecoderForCausalLM):
    @classmethod
    def describe(cls, reader: ConfigReader) -> DecoderSpec:
        return reader.decoder(reader.attention(), reader.mlp(), reader.norm())
