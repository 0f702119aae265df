"""Youtu-LLM (huggingface.co/tencent/Youtu-LLM-2B): a dense decoder with latent attention."""

from __future__ import annotations

from vllm.models.config_reader import ConfigReader
from vllm.models.decoder import DecoderForCausalLM
from vllm.models.latent_options import read_latent_attention
from vllm.models.spec import DecoderSpec


class YoutuForCausalLM(DecoderForCausalLM):
    @classmethod
    def describe(cls, reader: ConfigReader) -> DecoderSpec:
        reader.ignore("embedding_initializer_range")
        attention = read_latent_attention(reader, interleaved=True, value_dim=128)
        return reader.decoder(attention, reader.mlp(), reader.norm(), tied=True)
