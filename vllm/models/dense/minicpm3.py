"""MiniCPM3 (huggingface.co/openbmb/MiniCPM3-4B): MiniCPM's factors on embeddings, residuals and logits, and latent
attention."""

from __future__ import annotations

import math

from vllm.models.config_reader import ConfigReader
from vllm.models.decoder import DecoderForCausalLM
from vllm.models.latent_options import read_latent_attention
from vllm.models.spec import DecoderSpec


class MiniCPM3ForCausalLM(DecoderForCausalLM):
    @classmethod
    def describe(cls, reader: ConfigReader) -> DecoderSpec:
        depth = math.sqrt(reader.num_layers)
        given = reader.optional_number("scale_depth", default=1.4)
        base = reader.optional_number("dim_model_base", default=256)
        return reader.decoder(
            read_latent_attention(reader, interleaved=False, value_dim=reader.hidden_size // reader.num_heads),
            reader.mlp(),
            reader.norm(eps=1e-5),
            tied=True,
            embedding_scale=reader.number("scale_emb", default=12),
            residual_scale=1.0 if given is None else given / depth,
            logits_scale=1.0 if base is None else base / reader.hidden_size,
        )
