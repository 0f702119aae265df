"""OLMo (arXiv:2402.00838): norms without weights, clipped queries, keys and values."""

from __future__ import annotations

from vllm.models.config_reader import ConfigReader
from vllm.models.decoder import DecoderForCausalLM
from vllm.models.spec import DecoderSpec, NormSpec


class OlmoForCausalLM(DecoderForCausalLM):
    @classmethod
    def describe(cls, reader: ConfigReader) -> DecoderSpec:
        clip = reader.optional_number("clip_qkv")
        return reader.decoder(
            reader.attention(clip=clip), reader.mlp(bias=False), NormSpec("layer", 1e-5, weight=False)
        )
