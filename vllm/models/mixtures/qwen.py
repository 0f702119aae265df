"""Qwen's mixtures: Qwen1.5-MoE and Qwen2 (arXiv:2407.10671), with an MLP that all tokens take, by a gate, and Qwen3
(arXiv:2505.09388)."""

from __future__ import annotations

from collections.abc import Sequence

from vllm.models.checkpoint_names import CheckpointNames, split_experts
from vllm.models.config_reader import ConfigReader
from vllm.models.decoder import DecoderForCausalLM
from vllm.models.spec import DecoderSpec, MlpSpec, MoeSpec, rotating_in_windows


def mlps(reader: ConfigReader, mixture: MoeSpec, default_dense: Sequence[int] = ()) -> tuple[MlpSpec | MoeSpec, ...]:
    """The kind of each layer: a mixture in the last of each decoder_sparse_step, except in mlp_only_layers."""
    step = reader.integer("decoder_sparse_step", default=1)
    dense = reader.get("mlp_only_layers", default=default_dense)
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


class FlintForCausalLM(DecoderForCausalLM):
    """Flint: Qwen3's, with sinks, sigmoids and an MLP that all tokens take; positions in layers with a window alone."""

    names = CheckpointNames(
        (
            (r"\.self_attn\.softmax_offset", ".self_attn.sinks"),
            (r"\.mlp\.shared_expert\.", ".mlp.shared_experts."),
        ),
        (split_experts(),),
    )

    @classmethod
    def describe(cls, reader: ConfigReader) -> DecoderSpec:
        attention = reader.attention(head_dim=reader.head_dim_or(128), qk_norm=reader.norm(), sinks=True)
        last = reader.num_layers - 1
        full = [i < 2 or i % 4 == 1 or i == last for i in range(reader.num_layers)]
        kinds = ["full_attention" if is_full else "sliding_attention" for is_full in full]
        layers = rotating_in_windows(reader.windowed(attention, 513, default_kinds=kinds))
        mixture = reader.mixture(
            reader.integer("moe_intermediate_size", default=512),
            256,
            6,
            scores="sigmoid",
            renormalised=reader.boolean("norm_topk_prob", default=True),
            shared_size=reader.integer("shared_expert_intermediate_size", default=1024),
            router_is_float32=True,
        )
        return reader.decoder(layers, mlps(reader, mixture, [0, 1]), reader.norm())


class MellumForCausalLM(DecoderForCausalLM):
    """Mellum: Qwen3's, with rotary positions of each kind of layers."""

    names = CheckpointNames(transforms=(split_experts(),), ignored=r"mtp\..*")

    @classmethod
    def describe(cls, reader: ConfigReader) -> DecoderSpec:
        reader.ignore("num_nextn_predict_layers", "num_mtp_layers", "mtp_layer_types", "mtp_mlp_layer_types")
        attention = reader.attention(head_dim=reader.head_dim_or(128), rotary=False, qk_norm=reader.norm())
        kinds = ["full_attention"] * reader.num_layers
        layers = reader.by_kind(attention, kinds, 1024, theta=500000.0, partial=1.0)
        mixture = reader.mixture(
            reader.integer("moe_intermediate_size", default=896),
            64,
            8,
            renormalised=reader.boolean("norm_topk_prob", default=True),
        )
        mlp = reader.mlp(bias=False, size=7168)
        return reader.decoder(layers, reader.mixed(mixture, mlp, reader.first_dense(0)), reader.norm())
