"""OLMo, OLMo 2 and OLMo 3: norms without weights, or of what attention and MLP give."""

from __future__ import annotations

from collections.abc import Sequence

from vllm.models.checkpoint_names import OUTPUT_NORMS, CheckpointNames
from vllm.models.config_reader import ConfigReader
from vllm.models.decoder import DecoderForCausalLM
from vllm.models.spec import AttentionSpec, DecoderSpec, NormSpec


class OlmoForCausalLM(DecoderForCausalLM):
    """arXiv:2402.00838: norms without weights; clipped queries, keys and values."""

    @classmethod
    def describe(cls, reader: ConfigReader) -> DecoderSpec:
        clip = reader.optional_number("clip_qkv")
        return reader.decoder(
            reader.attention(clip=clip), reader.mlp(bias=False), NormSpec("layer", 1e-5, weight=False)
        )


class Olmo2ForCausalLM(DecoderForCausalLM):
    """OLMo 2 (arXiv:2501.00656): norms of what attention and MLP give, and of all queries and keys together."""

    names = CheckpointNames(OUTPUT_NORMS)

    @classmethod
    def layers(cls, reader: ConfigReader, qk_norm: NormSpec) -> Sequence[AttentionSpec]:
        """The attention of each layer."""
        return (reader.attention(qk_norm=qk_norm, qk_norm_over="width"),) * reader.num_layers

    @classmethod
    def describe(cls, reader: ConfigReader) -> DecoderSpec:
        norm = reader.norm(eps=1e-5)
        return reader.decoder(cls.layers(reader, norm), reader.mlp(bias=False), norm, block="output")


class Olmo3ForCausalLM(Olmo2ForCausalLM):
    """Layers of each kind rotate by options of their own."""

    @classmethod
    def layers(cls, reader: ConfigReader, qk_norm: NormSpec) -> Sequence[AttentionSpec]:
        attention = reader.attention(rotary=False, qk_norm=qk_norm, qk_norm_over="width")
        return reader.by_kind(attention, reader.every_nth_full(4), default_window=4096, theta=5e5, sliding_theta=5e5)
