"""LFM2 and LFM3 (arXiv:2511.23404): short convolutions in most layers, attention in the others."""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor

from vllm.config.checkpoint.config import RopeConfig
from vllm.models.checkpoint_names import CheckpointNames, Parts, split_evenly, split_experts
from vllm.models.config_reader import ConfigReader
from vllm.models.decoder import DecoderForCausalLM
from vllm.models.spec import AnyMixer, DecoderSpec, MlpSpec, RotarySpec
from vllm.models.states.specs import ShortConvSpec

_LFM3_ROPES = {
    "sliding_attention": RopeConfig("default", 10000.0),
    "full_attention": RopeConfig("proportional", 1000000.0, {"share": 0.5}),
}
_RENAMES = (
    (r"\.self_attn\.out_proj\.", ".self_attn.o_proj."),
    (r"\.conv\.(in_proj|out_proj|conv)\.", r".self_attn.\1."),
    (r"\.self_attn\.([qk])_layernorm\.", r".self_attn.\1_norm."),
    (r"(layers\.\d+)\.operator_norm\.", r"\1.input_layernorm."),
    (r"(layers\.\d+)\.ffn_norm\.", r"\1.post_attention_layernorm."),
    (r"(^|\.)embedding_norm\.", r"\1norm."),
    (r"\.feed_forward\.(experts\.\d+\.)?w1\.", r".mlp.\1gate_proj."),
    (r"\.feed_forward\.(experts\.\d+\.)?w2\.", r".mlp.\1down_proj."),
    (r"\.feed_forward\.(experts\.\d+\.)?w3\.", r".mlp.\1up_proj."),
    (r"\.feed_forward\.expert_bias", ".mlp.gate.e_score_correction_bias"),
    (r"\.feed_forward\.", ".mlp."),
)


def _taps_first(name: str, tensor: Tensor, spec: DecoderSpec) -> Parts:
    """The convolution's weight [C, 1, K] as [K, C]."""
    yield name, tensor.squeeze(1).t() if name.endswith(".conv.weight") else tensor


_TRANSFORMS = (_taps_first, split_evenly("in_proj", "b_proj", "c_proj", "x_proj"), split_experts())


class Lfm2ForCausalLM(DecoderForCausalLM):
    names = CheckpointNames(_RENAMES, _TRANSFORMS)

    @classmethod
    def describe(cls, reader: ConfigReader) -> DecoderSpec:
        size = reader.integer("block_ff_dim", "intermediate_size", default=12288)
        if reader.boolean("block_auto_adjust_ff_dim", default=True):
            size = int(reader.number("block_ffn_dim_multiplier", default=1.0) * (2 * size // 3))
            multiple = reader.integer("block_multiple_of", default=256)
            size = -(-size // multiple) * multiple
        reader.ignore("block_ffn_dim_multiplier", "block_multiple_of", "block_mlp_init_scale", "block_out_init_scale")
        return reader.decoder(cls.layers(reader), MlpSpec(size, "silu"), reader.norm(eps=1e-5), **cls.tied(reader))

    @staticmethod
    def tied(reader: ConfigReader) -> dict[str, bool]:
        """Whether the head is the embeddings."""
        return {"tied": reader.boolean("tie_embedding", default=True)}

    @staticmethod
    def layers(reader: ConfigReader) -> list[AnyMixer]:
        """By layer_types, or full_attn_idxs, attention or a convolution."""
        _ignore_names(reader)
        reader.only("head_dim", reader.hidden_size // reader.num_heads)
        attention = reader.attention(
            head_dim=reader.hidden_size // reader.num_heads,
            bias=False,
            rotary=reader.rotary(reader.hidden_size // reader.num_heads, theta=1000000.0),
            qk_norm=reader.norm(eps=1e-5),
        )
        with_attention = reader.get("full_attn_idxs", default=list(range(reader.num_layers)))
        default = ["full_attention" if index in with_attention else "conv" for index in range(reader.num_layers)]
        kinds = reader.kinds("layer_types", default, "full_attention", "conv")
        conv = _conv(reader)
        return [attention if kind == "full_attention" else conv for kind in kinds]


class Lfm2MoeForCausalLM(Lfm2ForCausalLM):
    @classmethod
    def describe(cls, reader: ConfigReader) -> DecoderSpec:
        mixture = reader.mixture(
            reader.integer("moe_intermediate_size", default=1792),
            32,
            4,
            scores="sigmoid",
            correction=reader.boolean("use_expert_bias", default=True),
            renormalised=reader.boolean("norm_topk_prob", default=True),
            added_to_sum=1e-6,
            scale=reader.number("routed_scaling_factor", default=1.0),
        )
        mlp = MlpSpec(reader.integer("intermediate_size", default=7168), "silu")
        first = reader.count("num_dense_layers", default=2)
        mlps = [mlp if index < first else mixture for index in range(reader.num_layers)]
        return reader.decoder(cls.layers(reader), mlps, reader.norm(eps=1e-5), **cls.tied(reader))


class Lfm3ForCausalLM(Lfm2ForCausalLM):
    """Also windows, a gate of each head, and norms of what a block adds."""

    names = CheckpointNames(
        (
            (r"\.self_attn\.g_proj\.", ".self_attn.gate_proj."),
            (r"\.post_operator_norm\.", ".attention_output_norm."),
            (r"\.post_ffn_norm\.", ".mlp_output_norm."),
            *_RENAMES,
        ),
        _TRANSFORMS,
    )

    @classmethod
    def describe(cls, reader: ConfigReader) -> DecoderSpec:
        block = "both" if reader.boolean("use_sandwich_norm", default=True) else "pre"
        mlp = MlpSpec(reader.integer("intermediate_size", default=7680), "silu")
        layers = cls.layers(reader)
        return reader.decoder(layers, mlp, reader.norm(eps=1e-5), block=block, **cls.tied(reader))

    @staticmethod
    def layers(reader: ConfigReader) -> list[AnyMixer]:
        _ignore_names(reader)
        attention = reader.attention(
            head_dim=reader.head_dim_or(128),
            rotary=False,
            qk_norm=reader.norm(eps=1e-5),
            output_gate="sigmoid" if reader.boolean("use_attention_gate", default=True) else None,
            gate_per_head=True,
        )
        default = [
            "full_attention" if index % 4 == 2 else "sliding_attention" if index % 4 == 0 and index else "conv"
            for index in range(reader.num_layers)
        ]
        kinds = reader.kinds("layer_types", default, "full_attention", "sliding_attention", "conv")
        window = reader.integer("sliding_window", default=256)
        by_kind: dict[str, AnyMixer] = {"conv": _conv(reader, 7)}
        for kind in {"full_attention", "sliding_attention"} & set(kinds):
            rotary = RotarySpec(attention.head_dim, _LFM3_ROPES[kind])
            if reader.get("rope_parameters", "rope_scaling") is not None:
                rotary = reader.rotary(attention.head_dim, kind=kind, theta=1000000.0, partial=1.0)
            by_kind[kind] = replace(attention, rotary=rotary, window=None if kind == "full_attention" else window)
        return [by_kind[kind] for kind in kinds]


def _conv(reader: ConfigReader, kernel_size: int = 3) -> ShortConvSpec:
    size = reader.integer("conv_dim", default=reader.hidden_size)
    if size != reader.hidden_size or reader.integer("conv_dim_out", default=size) != size:
        raise reader.refuse("conv_dim", "a convolution has hidden_size channels")
    taps = reader.integer("conv_L_cache", default=kernel_size)
    return ShortConvSpec(size, taps, reader.boolean("conv_bias", default=False))


def _ignore_names(reader: ConfigReader) -> None:
    """Options that published files have beside, without effect."""
    reader.ignore("conv_use_xavier_init", "block_dim", "block_norm_eps", "block_use_swiglu", "block_use_xavier_init")
    reader.ignore("conv_dim_out", "theta")
    reader.only("use_pos_enc", True)
