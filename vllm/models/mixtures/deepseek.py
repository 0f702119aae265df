"""DeepSeek V3's mixture (arXiv:2412.19437) in models with grouped-query attention: a sigmoid of each logit, a
correction of the choice, groups of experts, MLPs in the first layers."""

from __future__ import annotations

from typing import Any

from vllm.models.checkpoint_names import CheckpointNames, split_experts
from vllm.models.config_reader import ConfigReader
from vllm.models.decoder import DecoderForCausalLM
from vllm.models.dense.exaone4 import exaone_layers
from vllm.models.prediction_layers import DEEPSEEK, EXAONE
from vllm.models.spec import DecoderSpec, MoeSpec


def deepseek_mixture(
    reader: ConfigReader, size: int, experts: int | None, chosen: int | None, **fields: Any
) -> MoeSpec:
    """The mixture; sizes, counts, `groups` (how many there are and how many are kept) and the `scale` are the family's
    defaults."""
    reader.ignore("seq_aux", "ep_size")
    groups, kept = fields.pop("groups", (1, 1))
    scale = fields.pop("scale", 1.0)
    common = {"scores": "sigmoid", "correction": True}
    if "scores" not in fields:
        reader.only("scoring_func", "sigmoid", "noaux_tc")
        reader.only("topk_method", "noaux_tc")
    return reader.mixture(
        reader.integer("moe_intermediate_size", default=size),
        experts,
        chosen,
        num_groups=reader.integer("n_group", "num_expert_group", default=groups),
        num_groups_kept=reader.integer("topk_group", default=kept),
        group_best=2,
        renormalised=reader.boolean("norm_topk_prob", default=fields.pop("renormalised", True)),
        added_to_sum=1e-20,
        scale=reader.number("routed_scaling_factor", default=scale),
        **(common | fields),
    )


def shared_size(reader: ConfigReader, *names: str, size: int, count: int = 1) -> int:
    """Width of the MLP that all tokens take; its experts' `size` and `count` are the family's defaults."""
    return reader.count(*names, default=count) * reader.integer("moe_intermediate_size", default=size)


class Dots1ForCausalLM(DecoderForCausalLM):
    """dots.llm1 (arXiv:2506.05767): norms of heads, windows from a layer on."""

    names = CheckpointNames(transforms=(split_experts(),))

    @classmethod
    def describe(cls, reader: ConfigReader) -> DecoderSpec:
        first = reader.get("max_window_layers", default=62)
        kinds = ["sliding_attention" if i >= first else "full_attention" for i in range(reader.num_layers)]
        attention = reader.attention(qk_norm=reader.norm())
        layers = reader.windowed(attention, default_window=4096, default_kinds=kinds)
        mixture = deepseek_mixture(
            reader,
            1408,
            None,
            None,
            renormalised=False,
            shared_size=shared_size(reader, "n_shared_experts", size=1408),
        )
        dense = reader.first_dense(reader.count("first_k_dense_replace", default=0))
        return reader.decoder(layers, reader.mixed(mixture, reader.mlp(bias=False, size=10944), dense), reader.norm())


class ExaoneMoeForCausalLM(DecoderForCausalLM):
    """K-EXAONE (huggingface.co/LGAI-EXAONE/K-EXAONE-236B-A23B): positions in layers with a window alone."""

    names = CheckpointNames(
        ((r"\.mlp\.e_score_correction_bias", ".mlp.gate.e_score_correction_bias"),), (split_experts(),), r"mtp\..*"
    )
    prediction = EXAONE

    @classmethod
    def describe(cls, reader: ConfigReader) -> DecoderSpec:
        reader.ignore("num_nextn_predict_layers", "mtp_layer_types", "mtp_sliding_windows")
        norm = reader.norm(eps=1e-5)
        mixture = deepseek_mixture(
            reader,
            1024,
            64,
            8,
            scale=2.5,
            shared_size=shared_size(reader, "num_shared_experts", size=1024),
            router_is_float32=True,
        )
        dense = reader.first_dense(reader.count("first_k_dense_replace", default=1))
        mlps = reader.mixed(mixture, reader.mlp(bias=False, size=16384), dense)
        return reader.decoder(exaone_layers(reader, norm), mlps, norm)


class Glm4MoeForCausalLM(DecoderForCausalLM):
    """GLM-4.5 (arXiv:2508.06471): half of each head rotates."""

    names = CheckpointNames(transforms=(split_experts(),), has_further_layers=True)
    prediction = DEEPSEEK

    @classmethod
    def describe(cls, reader: ConfigReader) -> DecoderSpec:
        reader.ignore("num_nextn_predict_layers")
        norm = reader.norm(eps=1e-5)
        bias = reader.boolean("attention_bias", default=False)
        qk_norm = norm if reader.boolean("use_qk_norm", default=False) else None
        rotary = reader.rotary(reader.head_dim, partial=0.5)
        attention = reader.attention(bias=False, qkv_bias=bias, rotary=rotary, qk_norm=qk_norm)
        mixture = deepseek_mixture(
            reader,
            1408,
            128,
            8,
            shared_size=shared_size(reader, "n_shared_experts", size=1408),
            router_is_float32=True,
        )
        dense = reader.first_dense(reader.count("first_k_dense_replace", default=1))
        mlps = reader.mixed(mixture, reader.mlp(bias=False, size=10944), dense)
        return reader.decoder(attention, mlps, norm)


class SolarOpenForCausalLM(DecoderForCausalLM):
    """Solar Open (huggingface.co/upstage/Solar-Open-100B)."""

    names = CheckpointNames(transforms=(split_experts(),))

    @classmethod
    def describe(cls, reader: ConfigReader) -> DecoderSpec:
        head_dim = reader.integer("head_dim", default=128)
        bias = reader.boolean("attention_bias", default=False)
        rotary = reader.rotary(head_dim, theta=1000000.0)
        attention = reader.attention(head_dim=head_dim, bias=False, qkv_bias=bias, rotary=rotary)
        mixture = deepseek_mixture(
            reader,
            1280,
            128,
            8,
            shared_size=shared_size(reader, "n_shared_experts", size=1280),
            router_is_float32=True,
        )
        reader.ignore("intermediate_size", "first_k_dense_replace")
        return reader.decoder(attention, mixture, reader.norm(eps=1e-5))
