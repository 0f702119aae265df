"""MiniCPM (arXiv:2404.06395): Llama with factors on embeddings, residuals and logits."""

from __future__ import annotations

import math

from vllm.models.config_reader import ConfigReader
from vllm.models.decoder import DecoderForCausalLM
from vllm.models.spec import DecoderSpec


class MiniCPMForCausalLM(DecoderForCausalLM):
    @classmethod
    def describe(cls, reader: ConfigReader) -> DecoderSpec:
        base = reader.integer("dim_model_base", default=reader.hidden_size)
        return reader.decoder(
            reader.attention(),
            reader.mlp(),
            reader.norm(),
            tied=True,
            embedding_scale=reader.number("scale_emb", default=1.0),
            residual_scale=reader.number("scale_depth", default=math.sqrt(reader.num_layers))
            / math.sqrt(reader.num_layers),
            logits_scale=base / reader.hidden_size,
        )
