"""Arcee's AFM (huggingface.co/arcee-ai/AFM-4.5B): Llama with a plain MLP of squared ReLU."""

from __future__ import annotations

from vllm.models.config_reader import ConfigReader
from vllm.models.decoder import DecoderForCausalLM
from vllm.models.spec import DecoderSpec


class ArceeForCausalLM(DecoderForCausalLM):
    @classmethod
    def describe(cls, reader: ConfigReader) -> DecoderSpec:
        return reader.decoder(reader.attention(), reader.mlp("relu2", gated=False), reader.norm(eps=1e-5))
