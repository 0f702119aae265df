"""gpt-oss (arXiv:2508.10925): windows in every other layer, sinks, biases everywhere, a clamped gate."""

from __future__ import annotations

from vllm.models.checkpoint_names import CheckpointNames, gates_are_halves, split_experts
from vllm.models.config_reader import ConfigReader
from vllm.models.decoder import DecoderForCausalLM
from vllm.models.spec import DecoderSpec


class GptOssForCausalLM(DecoderForCausalLM):
    names = CheckpointNames(
        ((r"\.mlp\.router\.", ".mlp.gate."),), (split_experts(is_transposed=True, alternates=True),)
    )

    @classmethod
    def describe(cls, reader: ConfigReader) -> DecoderSpec:
        head_dim = reader.integer("head_dim", default=64)
        reader.need("rope_parameters", "rope_scaling")
        bias = reader.boolean("attention_bias", default=True)
        attention = reader.attention(
            head_dim=head_dim, bias=bias, rotary=reader.rotary(head_dim, theta=150000.0), sinks=True
        )
        kinds = ["full_attention" if i % 2 else "sliding_attention" for i in range(reader.num_layers)]
        reader.ignore("experts_per_token", "initial_context_length", "hidden_act")
        mixture = reader.mixture(
            reader.integer("intermediate_size", default=2880),
            128,
            4,
            compares_logits=True,
            clamp=(reader.number("swiglu_alpha", default=1.702), reader.number("swiglu_limit", default=7.0)),
            router_bias=True,
            expert_bias=True,
            alternates=gates_are_halves(reader.config.raw),
        )
        return reader.decoder(reader.windowed(attention, 128, default_kinds=kinds), mixture, reader.norm(eps=1e-5))
