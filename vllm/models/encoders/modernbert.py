"""ModernBERT (arXiv:2412.13663): rotary positions, layers with a window between those without, gated MLPs."""

from __future__ import annotations

from typing import Any

from vllm.models.checkpoint_names import CheckpointNames, split_evenly
from vllm.models.config_reader import ConfigReader
from vllm.models.encoders.encoder import EncoderForPooling, EncoderSpec, HeadSpec

_RENAMES = (
    (r"^model\.", ""),
    (r"^(embeddings|layers|final_norm)\.", r"model.\1."),
    (r"\.tok_embeddings\.", ".word_embeddings."),
    (r"^model\.embeddings\.norm\.", "model.embeddings.LayerNorm."),
    (r"\.attn\.Wqkv\.", ".qkv_proj."),
    (r"\.attn\.Wo\.", ".o_proj."),
    (r"\.mlp\.Wi\.", ".gate_up_proj."),
    (r"\.mlp\.Wo\.", ".down_proj."),
    (r"\.attn_norm\.", ".attention_norm."),
    (r"\.mlp_norm\.", ".output_norm."),
    (r"^classifier\.", "head.out_proj."),
)
_SPLITS = (split_evenly("qkv_proj", "q_proj", "k_proj", "v_proj"), split_evenly("gate_up_proj", "gate_proj", "up_proj"))


class ModernBertModel(EncoderForPooling):
    names = CheckpointNames(_RENAMES, _SPLITS)

    @classmethod
    def describe(cls, reader: ConfigReader) -> EncoderSpec:
        reader.ignore("decoder_bias", "deterministic_flash_attn", "sparse_prediction", "sparse_pred_ignore_index")
        # Of published files; those of transformers name the layers.
        reader.ignore("reference_compile", "repad_logits_with_grad", "position_embedding_type")
        if reader.get("classifier_pooling", default="cls") not in ("cls", "mean"):
            raise reader.refuse("classifier_pooling", "it must be cls or mean")
        every = reader.integer("global_attn_every_n_layers", default=3)
        kinds = reader.layer_kinds(
            ["sliding_attention" if index % every else "full_attention" for index in range(reader.num_layers)]
        )
        reach = reader.integer("local_attention", default=128) // 2
        head_dim = reader.hidden_size // reader.num_heads
        thetas: dict[str, Any] = {
            "theta": 160000.0,
            "theta_names": ("global_rope_theta",),
            "sliding_theta": reader.number("local_rope_theta", default=10000.0),
        }
        rotary = {kind: reader.rotary(head_dim, kind=kind, **thetas) for kind in set(kinds)}
        mlp = reader.mlp("gelu", activation_names=("hidden_activation",))
        bias = reader.boolean("attention_bias", default=False)
        return EncoderSpec(
            vocab_size=reader.integer("vocab_size"),
            hidden_size=reader.hidden_size,
            num_layers=reader.num_layers,
            num_heads=reader.num_heads,
            intermediate_size=mlp.intermediate_size,
            activation=mlp.activation,
            eps=reader.number("norm_eps", "layer_norm_eps", default=1e-5),
            context=reader.integer("max_position_embeddings", default=8192),
            rotary=tuple(rotary[kind] for kind in kinds),
            windows=tuple(reach + 1 if kind == "sliding_attention" else None for kind in kinds),
            gated=True,
            pre_norm=True,
            qkv_bias=bias,
            out_bias=bias,
            up_bias=mlp.up_bias,
            down_bias=mlp.down_bias,
            norm_bias=reader.boolean("norm_bias", default=False),
            head=cls._head(reader),
        )

    @classmethod
    def _head(cls, reader: ConfigReader) -> HeadSpec | None:
        reader.ignore("classifier_activation", "classifier_bias")
        return None


class ModernBertForSequenceClassification(ModernBertModel):
    @classmethod
    def _head(cls, reader: ConfigReader) -> HeadSpec:
        activation = reader.get("classifier_activation", default="gelu")
        return HeadSpec(activation, reader.boolean("classifier_bias", default=False), norm=True)


class ModernBertForTokenClassification(ModernBertForSequenceClassification):
    """The same head on each token."""
