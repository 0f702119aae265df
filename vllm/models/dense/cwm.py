"""Code World Model (arXiv:2510.02387): Llama with a window in three of four layers."""

from __future__ import annotations

from dataclasses import replace

from vllm.models.config_reader import ConfigReader
from vllm.models.decoder import DecoderForCausalLM
from vllm.models.spec import DecoderSpec


class CwmForCausalLM(DecoderForCausalLM):
    @classmethod
    def describe(cls, reader: ConfigReader) -> DecoderSpec:
        reader.need("rope_parameters", "rope_scaling")
        attention = reader.attention(head_dim=reader.integer("head_dim", default=128), bias=False, rotary=False)
        attention = replace(attention, rotary=reader.rotary(attention.head_dim, theta=1000000.0))
        kinds = reader.every_nth_full(4, is_first=True)
        layers = reader.windowed(attention, default_window=8192, default_kinds=kinds)
        return reader.decoder(layers, reader.mlp(), reader.norm(eps=1e-5))
