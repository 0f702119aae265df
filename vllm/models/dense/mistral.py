"""Mistral (arXiv:2310.06825): Llama whose layers may attend to a window."""

from __future__ import annotations

from dataclasses import replace
from typing import ClassVar

from vllm.models.config_reader import ConfigReader
from vllm.models.decoder import DecoderForCausalLM
from vllm.models.spec import DecoderSpec


class MistralForCausalLM(DecoderForCausalLM):
    default_window: ClassVar[int | None] = 4096
    default_eps: ClassVar[float] = 1e-6
    default_head_dim: ClassVar[int | None] = None

    @classmethod
    def describe(cls, reader: ConfigReader) -> DecoderSpec:
        head_dim = None if cls.default_head_dim is None else reader.head_dim_or(cls.default_head_dim)
        attention = reader.windowed(reader.attention(head_dim=head_dim, bias=False), cls.default_window)
        return reader.decoder(attention, reader.mlp(bias=False), reader.norm(eps=cls.default_eps))


class MinistralForCausalLM(MistralForCausalLM):
    """Ministral 8B: a window in some layers."""


class Ministral3ForCausalLM(MistralForCausalLM):
    """Ministral 3: queries grow with the logarithm of their position."""

    default_window = None
    default_eps = 1e-5
    default_head_dim = 128

    @classmethod
    def describe(cls, reader: ConfigReader) -> DecoderSpec:
        reader.need("rope_parameters", "rope_scaling")
        spec = super().describe(reader)
        rotary = spec.cached[0].rotary
        assert rotary is not None
        params = rotary.rope.params
        if params.get("llama_4_scaling_beta") is None:
            return spec
        growth = float(params["llama_4_scaling_beta"]), float(params["original_max_position_embeddings"])
        return replace(spec, layers=tuple(replace(layer, query_growth=growth) for layer in spec.cached))
