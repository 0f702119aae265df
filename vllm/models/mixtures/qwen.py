"""Qwen's mixtures: Qwen1.5-MoE and Qwen2 (arXiv:2407.10671), with an MLP that all tokens take, by a gate, and Qwen3
(arXiv:2505.09388)."""

from __future__ import annotations

from vllm.models.checkpoint_names import CheckpointNames, split_experts
from vllm.models.config_reader import ConfigReader
from vllm.models.decoder import DecoderForCausalLM
from vllm.models.spec import DecoderSpec, MlpSpec, MoeSpec


def mlps(reader: ConfigReader, mixture: MoeSpec) -> tuple[MlpSpec | MoeSpec, ...]:
    """Of each layer: a mixture in the last of each decoder_sparse_step, except in mlp_only_layers."""
    step = reader.integer("decoder_sparse_step", default=1)
    dense = reader.get("mlp_only_layers", default=[])
    kinds = ["dense" if i in dense or (i + 1) % step else "sparse" for i in range(reader.num_layers)]
    mlp = reader.mlp(bias=False) if "dense" in kinds else MlpSpec(mixture.expert_size, mixture.activation)
    reader.ignore("intermediate_size")
    return reader.mixed(mixture, mlp, kinds)


class Qwen2MoeForCausalLM(DecoderForCausalLM):
    names = CheckpointNames(((r"\.shared_expert\.", ".shared_experts."),), (split_experts(),))

    @classmethod
    def describe(cls, reader: ConfigReader) -> DecoderSpec:
        attention = reader.attention(bias=False, qkv_bias=reader.boolean("qkv_bias", default=True))
        first = reader.integer("max_window_layers", default=28)
        kinds = ["sliding_attention" if i < first and not i % 2 else "full_attention" for i in range(reader.num_layers)]
        layers = reader.windowed(attention, 0, "use_sliding_window", kinds)
        mixture = reader.mixture(
            reader.integer("moe_intermediate_size", default=1408),
            60,
            4,
            renormalised=reader.boolean("norm_topk_prob", default=False),
            shared_size=reader.integer("shared_expert_intermediate_size", default=5632),
            shared_gate=True,
        )
        return reader.decoder(layers, mlps(reader, mixture), reader.norm())


class Qwen3MoeForCausalLM(DecoderForCausalLM):
    names = CheckpointNames(transforms=(split_experts(),))

    @classmethod
    def describe(cls, reader: ConfigReader) -> DecoderSpec:
        reader.ignore("max_window_layers")
        attention = reader.attention(qk_norm=reader.norm())
        kinds = ["sliding_attention"] * reader.num_layers
        layers = reader.windowed(attention, switch="use_sliding_window", default_kinds=kinds)
        mixture = reader.mixture(
            reader.integer("moe_intermediate_size", default=768),
            128,
            8,
            renormalised=reader.boolean("norm_topk_prob", default=False),
        )
        return reader.decoder(layers, mlps(reader, mixture), reader.norm())
