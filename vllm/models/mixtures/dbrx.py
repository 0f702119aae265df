"""DBRX (huggingface.co/databricks/dbrx-instruct): LayerNorms without biases, clamped queries, keys and values."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from torch import Tensor

from vllm.config.checkpoint.config import HFConfig
from vllm.models.checkpoint_names import CheckpointNames, Parts, split_experts, split_qkv
from vllm.models.config_reader import ConfigReader
from vllm.models.decoder import DecoderForCausalLM
from vllm.models.spec import DecoderSpec, MoeSpec

_MATRICES = {"w1": "gate_proj", "v1": "up_proj", "w2": "down_proj"}


def _stacked(name: str, tensor: Tensor, spec: DecoderSpec) -> Parts:
    """All experts' [E * outputs, inputs], of w2 [E * inputs, outputs], as [E, outputs, inputs]."""
    stem, _, kind = name.rpartition(".mlp.experts.mlp.")
    if not stem:
        yield name, tensor
        return
    mixture = spec.mlps[0]
    assert isinstance(mixture, MoeSpec)
    stack = tensor.unflatten(0, (mixture.num_experts, -1))
    yield f"{stem}.mlp.experts.{_MATRICES[kind]}", stack.mT if kind == "w2" else stack


class DbrxForCausalLM(DecoderForCausalLM):
    names = CheckpointNames(
        (
            (r"^transformer\.wte\.", "model.embed_tokens."),
            (r"^transformer\.norm_f\.", "model.norm."),
            (r"^transformer\.blocks\.", "model.layers."),
            (r"\.norm_attn_norm\.norm_1\.", ".input_layernorm."),
            (r"\.norm_attn_norm\.norm_2\.", ".post_attention_layernorm."),
            (r"\.norm_attn_norm\.attn\.Wqkv\.", ".self_attn.qkv_proj."),
            (r"\.norm_attn_norm\.attn\.out_proj\.", ".self_attn.o_proj."),
            (r"\.ffn\.router\.layer\.", ".mlp.gate."),
            (r"\.ffn\.experts\.", ".mlp.experts."),
        ),
        (split_qkv, _stacked, split_experts()),
    )

    @classmethod
    def spec_of(cls, config: HFConfig) -> DecoderSpec:
        return super().spec_of(replace(config, raw=_flat(config.raw)))

    @classmethod
    def describe(cls, reader: ConfigReader) -> DecoderSpec:
        reader.ignore("moe_jitter_eps", "num_key_value_heads")
        attention = reader.attention(
            bias=False,
            num_kv_heads=reader.integer("kv_n_heads", default=1),
            clip=reader.optional_number("clip_qkv"),
        )
        power = reader.get("moe_normalize_expert_weights", default=None if _NORM in reader.config.raw else 1.0)
        if power not in (None, 1):
            raise reader.refuse(_NORM, "it must be 1 or null")
        mixture = reader.mixture(reader.integer("ffn_hidden_size", default=3584), 4, 1, renormalised=power is not None)
        return reader.decoder(attention, mixture, reader.norm("layer", 1e-5))


_NORM = "moe_normalize_expert_weights"


def _flat(raw: dict[str, Any]) -> dict[str, Any]:
    """The options of attention and experts among the others."""
    flat = {name: value for name, value in raw.items() if name not in ("attn_config", "ffn_config")}
    flat |= raw.get("attn_config") or {}
    flat |= raw.get("ffn_config") or {}
    if "moe_top_k" in flat:
        flat["moe_topk"] = flat.pop("moe_top_k")
    act = flat.pop("ffn_act_fn", None)
    if isinstance(act, dict) and "name" in act:
        flat["hidden_act"] = act["name"]
    # The whole model's name counts.
    return flat | {name: raw[name] for name in ("model_type", "architectures") if name in raw}
