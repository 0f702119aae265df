"""Granite 3 (huggingface.co/ibm-granite/granite-3.0-8b-instruct) and HyperCLOVA X: Llama with factors on embeddings,
scores, residuals and logits."""

from __future__ import annotations

from dataclasses import replace

from vllm.model_executor.models.checkpoint_names import CheckpointNames
from vllm.model_executor.models.config_reader import ConfigReader
from vllm.model_executor.models.decoder import DecoderForCausalLM
from vllm.model_executor.models.spec import DecoderSpec


class GraniteForCausalLM(DecoderForCausalLM):
    @classmethod
    def describe(cls, reader: ConfigReader) -> DecoderSpec:
        return reader.decoder(
            reader.attention(scale=reader.number("attention_multiplier", default=1.0)),
            reader.mlp(),
            reader.norm(),
            embedding_scale=reader.number("embedding_multiplier", default=1.0),
            residual_scale=reader.number("residual_multiplier", default=1.0),
            logits_scale=1.0 / reader.number("logits_scaling", default=1.0),
        )


class HyperCLOVAXForCausalLM(GraniteForCausalLM):
    names = CheckpointNames(((r"\.post_norm1\.", ".attention_output_norm."), (r"\.post_norm2\.", ".mlp_output_norm.")))

    @classmethod
    def describe(cls, reader: ConfigReader) -> DecoderSpec:
        spec = super().describe(reader)
        scale = reader.optional_number("attention_multiplier")
        return replace(
            spec,
            layers=tuple(replace(layer, scale=scale) for layer in spec.layers),
            logits_scale=reader.number("logits_scaling", default=1.0),
            block="both" if reader.boolean("use_post_norm", default=True) else "pre",
        )
