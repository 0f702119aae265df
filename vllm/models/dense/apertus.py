"""Apertus (arXiv:2509.14233): Llama with norms of heads and a plain MLP with xIELU."""

from __future__ import annotations

from vllm.config.checkpoint.config import RopeConfig
from vllm.models.checkpoint_names import CheckpointNames
from vllm.models.config_reader import ConfigReader
from vllm.models.decoder import DecoderForCausalLM
from vllm.models.spec import DecoderSpec, RotarySpec

_LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
_ROPE = RopeConfig("llama3", 12000000.0, _LLAMA3)


class ApertusForCausalLM(DecoderForCausalLM):
    names = CheckpointNames(
        (
            (r"\.attention_layernorm\.", ".input_layernorm."),
            (r"\.feedforward_layernorm\.", ".post_attention_layernorm."),
        )
    )

    @classmethod
    def describe(cls, reader: ConfigReader) -> DecoderSpec:
        norm = reader.norm(eps=1e-5)
        qk_norm = norm if reader.boolean("qk_norm", default=True) else None
        rotary = RotarySpec(reader.head_dim, _ROPE)
        if reader.get("rope_parameters", "rope_scaling", "rope_theta") is not None:
            rotary = reader.rotary(reader.head_dim, theta=12000000.0)
        attention = reader.attention(qk_norm=qk_norm, rotary=rotary)
        return reader.decoder(attention, reader.mlp("xielu", bias=False, gated=False), norm)
