"""Jais 2 (huggingface.co/inceptionai/Jais-2-8B-Chat): LayerNorm, squared ReLU, biases."""

from __future__ import annotations

from vllm.models.config_reader import ConfigReader
from vllm.models.decoder import DecoderForCausalLM
from vllm.models.spec import DecoderSpec


class Jais2ForCausalLM(DecoderForCausalLM):
    @classmethod
    def describe(cls, reader: ConfigReader) -> DecoderSpec:
        attention = reader.attention(bias=reader.boolean("attention_bias", default=True))
        mlp = reader.mlp("relu2", bias=reader.boolean("mlp_bias", default=True), gated=False)
        return reader.decoder(attention, mlp, reader.layer_norm())
