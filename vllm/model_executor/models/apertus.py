"""Apertus (arXiv:2509.14233): Llama with norms of heads and a plain MLP with xIELU."""

from __future__ import annotations

from vllm.model_executor.models.checkpoint_names import CheckpointNames
from vllm.model_executor.models.config_reader import ConfigReader
from vllm.model_executor.models.decoder import DecoderForCausalLM
from vllm.model_executor.models.spec import DecoderSpec


class ApertusForCausalLM(DecoderForCausalLM):
    names = CheckpointNames(
        (
            (r"\.attention_layernorm\.", ".input_layernorm."),
            (r"\.feedforward_layernorm\.", ".post_attention_layernorm."),
        )
    )

    @classmethod
    def describe(cls, reader: ConfigReader) -> DecoderSpec:
        reader.need("rope_parameters", "rope_scaling")
        norm = reader.norm(eps=1e-5)
        qk_norm = norm if reader.boolean("qk_norm", default=True) else None
        attention = reader.attention(qk_norm=qk_norm, rotary=reader.rotary(reader.head_dim, theta=12000000.0))
        return reader.decoder(attention, reader.mlp("xielu", bias=False, gated=False), norm)
