"""Nemotron and Minitron (arXiv:2402.16819): LayerNorm with 1 + weight, squared ReLU, partial rotary positions."""

from __future__ import annotations

from vllm.models.config_reader import ConfigReader
from vllm.models.decoder import DecoderForCausalLM
from vllm.models.spec import DecoderSpec


class NemotronForCausalLM(DecoderForCausalLM):
    @classmethod
    def describe(cls, reader: ConfigReader) -> DecoderSpec:
        names = "partial_rotary_factor", "rope_percent", "rotary_percent"
        return reader.decoder(
            reader.attention(rotary=reader.rotary(reader.head_dim, partial=0.5, share_names=names)),
            reader.mlp("relu2", gated=False),
            reader.layer_norm(offset=1.0),
        )
