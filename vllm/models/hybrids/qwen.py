"""Qwen3-Next and Qwen3.5: linear attention by the gated delta rule in most layers, gated attention in the others."""

from __future__ import annotations

from torch import Tensor

from vllm.models.checkpoint_names import CheckpointNames, Parts, split_experts
from vllm.models.config_reader import ConfigReader
from vllm.models.decoder import DecoderForCausalLM
from vllm.models.hybrids.options import delta_rule
from vllm.models.hybrids.weights import delta_rule_of, split_delta_conv
from vllm.models.mixtures.qwen import mlps
from vllm.models.prediction_layers import QWEN
from vllm.models.spec import AnyMixer, DecoderSpec, MlpSpec, MoeSpec

_RENAMES = (
    (r"\.linear_attn\.conv1d\.", ".self_attn.conv."),
    (r"\.linear_attn\.(A_log|dt_bias)$", r".self_attn.decays.\1"),
    (r"\.linear_attn\.in_proj_([abz])\.", r".self_attn.\1_proj."),
    (r"\.linear_attn\.", ".self_attn."),
    (r"\.mlp\.shared_expert\.", ".mlp.shared_experts."),
)
_FURTHER = r"mtp\..*"


def _split_gates(name: str, tensor: Tensor, spec: DecoderSpec) -> Parts:
    """q_proj: of each head the query, then the gate."""
    if not name.endswith(".q_proj.weight"):
        yield name, tensor
        return
    heads = tensor.unflatten(0, (spec.cached[0].num_heads, 2, -1))
    yield name, heads[:, 0].flatten(0, 1)
    yield name.replace(".q_proj.", ".gate_proj."), heads[:, 1].flatten(0, 1)


def _split_groups(name: str, tensor: Tensor, spec: DecoderSpec) -> Parts:
    """in_proj_qkvz and in_proj_ba: for each head of keys its query, key, values and gates, and its two numbers."""
    kind = name.removesuffix(".weight").rpartition(".")[2]
    if kind not in ("in_proj_qkvz", "in_proj_ba"):
        yield name, tensor
        return
    layer = delta_rule_of(spec)
    share = layer.heads // layer.key_heads
    values = share * layer.value_dim
    parts = {"b_proj": share, "a_proj": share}
    if kind == "in_proj_qkvz":
        parts = {"q_proj": layer.key_dim, "k_proj": layer.key_dim, "v_proj": values, "z_proj": values}
    groups = tensor.unflatten(0, (layer.key_heads, -1)).split(list(parts.values()), dim=1)
    for part, rows in zip(parts, groups, strict=True):
        yield name.replace(kind, part), rows.flatten(0, 1)


def _split_projection(name: str, tensor: Tensor, spec: DecoderSpec) -> Parts:
    """in_proj_qkv: queries, keys, values."""
    if not name.endswith(".in_proj_qkv.weight"):
        yield name, tensor
        return
    layer = delta_rule_of(spec)
    keys = layer.key_heads * layer.key_dim
    for part, rows in zip("qkv", tensor.split([keys, keys, layer.heads * layer.value_dim]), strict=True):
        yield name.replace("in_proj_qkv", f"{part}_proj"), rows


class Qwen3NextForCausalLM(DecoderForCausalLM):
    """Its projections by heads of keys, or, in GGUF files, as those of Qwen3.5."""

    names = CheckpointNames(
        _RENAMES, (_split_gates, _split_groups, _split_projection, split_delta_conv, split_experts()), _FURTHER
    )
    prediction = QWEN

    @classmethod
    def describe(cls, reader: ConfigReader) -> DecoderSpec:
        mixture = _mixture(reader, 512, 10, reader.boolean("norm_topk_prob", default=True))
        return reader.decoder(_layers(reader), mlps(reader, mixture), reader.norm(offset=1.0))


class Qwen3_5ForCausalLM(DecoderForCausalLM):
    names = CheckpointNames(_RENAMES, (_split_gates, _split_projection, split_delta_conv, split_experts()), _FURTHER)
    prediction = QWEN

    @classmethod
    def describe(cls, reader: ConfigReader) -> DecoderSpec:
        return reader.decoder(_layers(reader), cls._mlp(reader), reader.norm(offset=1.0))

    @staticmethod
    def _mlp(reader: ConfigReader) -> MlpSpec | MoeSpec:
        reader.ignore("mtp_num_hidden_layers", "mtp_use_dedicated_embeddings")
        return reader.mlp(bias=False, size=12288)


class Qwen3_5MoeForCausalLM(Qwen3_5ForCausalLM):
    @staticmethod
    def _mlp(reader: ConfigReader) -> MlpSpec | MoeSpec:
        reader.ignore("mtp_num_hidden_layers", "mtp_use_dedicated_embeddings", "intermediate_size")
        return _mixture(reader, 256, 8, True)


def _mixture(reader: ConfigReader, experts: int, chosen: int, renormalised: bool) -> MoeSpec:
    return reader.mixture(
        reader.integer("moe_intermediate_size", default=512),
        experts,
        chosen,
        renormalised=renormalised,
        shared_size=reader.integer("shared_expert_intermediate_size", default=512),
        shared_gate=True,
    )


def _layers(reader: ConfigReader) -> list[AnyMixer]:
    reader.only("attention_bias", False)
    reader.only("attn_output_gate", True)
    # States are float32 in any case.
    reader.ignore("mamba_ssm_dtype")
    head_dim = reader.head_dim_or(256)
    attention = reader.attention(
        head_dim=head_dim,
        bias=False,
        # Texts have the same position in all sections.
        rotary=reader.rotary(head_dim, partial=0.25, parameters=("mrope_section", "mrope_interleaved")),
        qk_norm=reader.norm(offset=1.0),
        output_gate="sigmoid",
    )
    every = reader.integer("full_attention_interval", default=4)
    default = ["linear_attention" if (i + 1) % every else "full_attention" for i in range(reader.num_layers)]
    kinds = reader.kinds("layer_types", default, "linear_attention", "full_attention")
    linear = delta_rule(reader, 16, 32, 128, 128, reader.norm().eps)
    return [linear if kind == "linear_attention" else attention for kind in kinds]
