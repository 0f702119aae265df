"""Granite 3 (huggingface.co/ibm-granite/granite-3.0-8b-instruct), Granite with windows, and HyperCLOVA X: Llama with
factors on embeddings, scores, residuals and logits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import ClassVar

from vllm.models.checkpoint_names import CheckpointNames
from vllm.models.config_reader import ConfigReader
from vllm.models.decoder import DecoderForCausalLM
from vllm.models.spec import AnyMixer, AttentionSpec, DecoderSpec, MlpSpec, MoeSpec


class GraniteForCausalLM(DecoderForCausalLM):
    default_eps: ClassVar[float] = 1e-6
    is_tied: ClassVar[bool] = False

    @classmethod
    def layers(cls, reader: ConfigReader) -> Sequence[AnyMixer]:
        """The attention of each layer, or what it has in its place."""
        return (reader.attention(scale=reader.number("attention_multiplier", default=1.0)),) * reader.num_layers

    @classmethod
    def mlp(cls, reader: ConfigReader) -> MlpSpec | MoeSpec:
        """The MLP of all layers."""
        return reader.mlp()

    @classmethod
    def describe(cls, reader: ConfigReader) -> DecoderSpec:
        return reader.decoder(
            cls.layers(reader),
            cls.mlp(reader),
            reader.norm(eps=cls.default_eps),
            tied=cls.is_tied,
            embedding_scale=reader.number("embedding_multiplier", default=1.0),
            scales_given=True,
            residual_scale=reader.number("residual_multiplier", default=1.0),
            logits_scale=1.0 / reader.number("logits_scaling", default=1.0),
        )


class GraniteSWAForCausalLM(GraniteForCausalLM):
    """Windows in most layers, sinks, and a base of its own for each layer's rotation, 0 for none."""

    default_eps = 1e-5
    is_tied = True

    @classmethod
    def layers(cls, reader: ConfigReader) -> Sequence[AttentionSpec]:
        (attention, *_) = super().layers(reader)
        assert isinstance(attention, AttentionSpec)
        kinds = reader.every_nth_full(4, is_first=True)
        layers = reader.windowed(replace(attention, sinks=True), default_window=128, default_kinds=kinds)
        assert attention.rotary is not None
        rope = attention.rotary.rope
        bases = reader.get("layer_rope_theta", default=[rope.theta] * reader.num_layers)
        if not isinstance(bases, list) or len(bases) != reader.num_layers:
            raise reader.refuse("layer_rope_theta", f"it must have {reader.num_layers} numbers")
        rotaries = [replace(attention.rotary, rope=replace(rope, theta=base)) if base else None for base in bases]
        return [replace(layer, rotary=rotary) for layer, rotary in zip(layers, rotaries, strict=True)]


class HyperCLOVAXForCausalLM(GraniteForCausalLM):
    names = CheckpointNames(((r"\.post_norm1\.", ".attention_output_norm."), (r"\.post_norm2\.", ".mlp_output_norm.")))

    @classmethod
    def describe(cls, reader: ConfigReader) -> DecoderSpec:
        spec = super().describe(reader)
        scale = reader.optional_number("attention_multiplier")
        return replace(
            spec,
            layers=tuple(replace(layer, scale=scale) for layer in spec.attentions),
            logits_scale=reader.number("logits_scaling", default=1.0),
            block="both" if reader.boolean("use_post_norm", default=True) else "pre",
        )
