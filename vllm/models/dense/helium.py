"""Helium (huggingface.co/kyutai/helium-1-preview-2b): Llama with interleaved rotary positions."""

from __future__ import annotations

from vllm.models.config_reader import ConfigReader
from vllm.models.decoder import DecoderForCausalLM
from vllm.models.spec import DecoderSpec


class HeliumForCausalLM(DecoderForCausalLM):
    @classmethod
    def describe(cls, reader: ConfigReader) -> DecoderSpec:
        head_dim = reader.head_dim_or(128)
        rotary = reader.rotary(head_dim, theta=100000.0, interleaved=True)
        attention = reader.attention(head_dim=head_dim, o_bias=False, rotary=rotary)
        return reader.decoder(attention, reader.mlp(), reader.norm(eps=1e-8))
