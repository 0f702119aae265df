"""GTE's encoders (arXiv:2407.19669), published as NewModel: BERT with rotary positions and gated MLPs."""

from __future__ import annotations

from typing import Any

from vllm.config.checkpoint.config import RopeConfig
from vllm.models.checkpoint_names import CheckpointNames, split_evenly
from vllm.models.config_reader import ConfigReader
from vllm.models.encoders.bert import IGNORED
from vllm.models.encoders.encoder import EncoderForPooling, EncoderSpec, encoder
from vllm.models.spec import RotarySpec

_RENAMES = (
    (r"^(new|gte)\.", ""),
    (r"^embeddings\.", "model.embeddings."),
    (r"^encoder\.layer\.", "model.layers."),
    (r"\.attention\.", "."),
    (r"\.attn_ln\.", ".attention_norm."),
    (r"\.mlp_ln\.", ".output_norm."),
)
_SPLITS = (split_evenly("qkv_proj", "q_proj", "k_proj", "v_proj"), split_evenly("up_gate_proj", "up_proj", "gate_proj"))
# The only values that are implemented, besides null.
_FIXED: dict[str, tuple[Any, ...]] = {
    "position_embedding_type": ("rope",),
    "layer_norm_type": ("layer_norm",),
    "logn_attention_scale": (False,),
    "logn_attention_clip1": (False,),
}


class GteModel(EncoderForPooling):
    names = CheckpointNames(_RENAMES, _SPLITS, ignored=IGNORED)

    @classmethod
    def describe(cls, reader: ConfigReader) -> EncoderSpec:
        for name, values in _FIXED.items():
            if reader.get(name, default=values[0]) not in values:
                raise reader.refuse(name, f"it must be {values[0]}")
        reader.ignore("pack_qkv", "unpad_inputs", "use_memory_efficient_attention")
        return encoder(
            reader,
            reader.mlp("gelu", bias=True, up_bias=False),
            eps=reader.number("layer_norm_eps", default=1e-12),
            context=reader.integer("max_position_embeddings", default=8192),
            num_types=reader.count("type_vocab_size", default=1),
            rotary=(_rotary(reader),) * reader.num_layers,
        )


def _rotary(reader: ConfigReader) -> RotarySpec:
    """Their "ntk" scaling multiplies the base by the factor, then divides all frequencies by factor ** (2 / dim)."""
    head_dim = reader.head_dim
    scaling = reader.get("rope_scaling")
    if not isinstance(scaling, dict) or scaling.get("type") != "ntk":
        return reader.rotary(head_dim, theta=160000.0)
    if unknown := sorted(name for name, value in scaling.items() if name not in ("type", "factor") and value):
        raise reader.refuse("rope_scaling", f"type ntk has no parameter {unknown[0]}")
    factor, theta = scaling.get("factor"), reader.number("rope_theta", default=10000.0)
    if isinstance(factor, bool) or not isinstance(factor, (int, float)) or factor < 1:
        raise reader.refuse("rope_scaling", "factor must be a number of at least 1")
    divisor = factor ** (2 / head_dim)
    return RotarySpec(head_dim, RopeConfig("factors", theta * factor, {"factors": [divisor] * (head_dim // 2)}))
