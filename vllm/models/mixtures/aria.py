"""The text decoder of Aria (arXiv:2410.05993)."""

from __future__ import annotations

from vllm.models.checkpoint_names import CheckpointNames, split_experts
from vllm.models.config_reader import ConfigReader
from vllm.models.decoder import DecoderForCausalLM
from vllm.models.spec import DecoderSpec


class AriaTextForCausalLM(DecoderForCausalLM):
    names = CheckpointNames(
        (
            (r"\.mlp\.router\.", ".mlp.gate."),
            (r"\.mlp\.experts\.fc1\.weight", ".mlp.experts.gate_up_proj"),
            (r"\.mlp\.experts\.fc2\.weight", ".mlp.experts.down_proj"),
        ),
        (split_experts(is_transposed=True),),
    )

    @classmethod
    def describe(cls, reader: ConfigReader) -> DecoderSpec:
        size = reader.integer("intermediate_size", default=4096)
        mixture = reader.mixture(
            size,
            8,
            2,
            compares_logits=True,
            own_activation="silu",
            shared_size=reader.count("moe_num_shared_experts", default=2) * size,
            mlp_bias=reader.boolean("mlp_bias", default=False),
        )
        return reader.decoder(reader.attention(), mixture, reader.norm())
