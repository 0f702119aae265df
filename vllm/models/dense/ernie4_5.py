"""ERNIE 4.5 (huggingface.co/baidu/ERNIE-4.5-0.3B-PT): Llama with interleaved rotary positions."""

from __future__ import annotations

from vllm.models.config_reader import ConfigReader
from vllm.models.decoder import DecoderForCausalLM
from vllm.models.spec import DecoderSpec


class Ernie4_5ForCausalLM(DecoderForCausalLM):
    @classmethod
    def describe(cls, reader: ConfigReader) -> DecoderSpec:
        bias = reader.boolean("use_bias", default=False)
        head_dim = reader.head_dim_or(128)
        rotary = reader.rotary(head_dim, theta=500000.0, interleaved=True)
        return reader.decoder(
            reader.attention(head_dim=head_dim, bias=bias, rotary=rotary),
            reader.mlp(bias=bias),
            reader.norm(eps=1e-5),
            tied=True,
        )
