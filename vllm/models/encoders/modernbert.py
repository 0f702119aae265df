"""ModernBERT (arXiv:2412.13663): rotary positions, layers with a window between those without, gated MLPs."""

from __future__ import annotations

from typing import Any, ClassVar

from vllm.models.checkpoint_names import CheckpointNames, split_evenly
from vllm.models.config_reader import ConfigReader
from vllm.models.encoders.encoder import EncoderForPooling, EncoderSpec, encoder
from vllm.models.encoders.heads import OUTPUT, SEQUENCE, TOKENS, WORDS, Head, HeadSpec, words_spec

_RENAMES = (
    (r"^model\.", ""),
    (r"^(embeddings|layers|final_norm)\.", r"model.\1."),
    (r"\.tok_embeddings\.", ".word_embeddings."),
    (r"^model\.embeddings\.norm\.", "model.embeddings.LayerNorm."),
    (r"\.attn\.Wqkv\.", ".qkv_proj."),
    (r"\.attn\.Wo\.", ".o_proj."),
    (r"\.mlp\.Wi\.", ".mlp.gate_up_proj."),
    (r"\.mlp\.Wo\.", ".mlp.down_proj."),
    (r"\.attn_norm\.", ".attention_norm."),
    (r"\.mlp_norm\.", ".output_norm."),
)
_SPLITS = (split_evenly("qkv_proj", "q_proj", "k_proj", "v_proj"), split_evenly("gate_up_proj", "gate_proj", "up_proj"))


def _dense(reader: ConfigReader) -> tuple[str, bool]:
    return reader.get("classifier_activation", default="gelu"), reader.boolean("classifier_bias", default=False)


def _classes(reader: ConfigReader, _: str) -> HeadSpec:
    return HeadSpec(*_dense(reader), norm=True)


def _words(reader: ConfigReader, _: str) -> HeadSpec:
    if not reader.boolean("decoder_bias", default=True):
        raise reader.refuse("decoder_bias", "words must have a bias")
    return words_spec(reader, *_dense(reader))


class ModernBertModel(EncoderForPooling):
    names = CheckpointNames(_RENAMES, _SPLITS)
    heads: ClassVar[dict[str, Head]] = {
        SEQUENCE: Head(_classes, (OUTPUT,)),
        TOKENS: Head(_classes, (OUTPUT,)),
        WORDS: Head(_words, ((r"^decoder\.", "head.out_proj."),)),
    }

    @classmethod
    def describe(cls, reader: ConfigReader) -> EncoderSpec:
        reader.ignore("classifier_activation", "classifier_bias", "decoder_bias")
        reader.ignore("deterministic_flash_attn", "sparse_prediction", "sparse_pred_ignore_index")
        # Published files have these; those of transformers name the layers.
        reader.ignore("reference_compile", "repad_logits_with_grad", "position_embedding_type")
        if reader.get("classifier_pooling", default="cls") not in ("cls", "mean"):
            raise reader.refuse("classifier_pooling", "it must be cls or mean")
        every = reader.integer("global_attn_every_n_layers", default=3)
        kinds = reader.layer_kinds(reader.every_nth_full(every, is_first=True))
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
        return encoder(
            reader,
            mlp,
            eps=reader.number("norm_eps", "layer_norm_eps", default=1e-5),
            context=reader.integer("max_position_embeddings", default=8192),
            rotary=tuple(rotary[kind] for kind in kinds),
            windows=tuple(reach + 1 if kind == "sliding_attention" else None for kind in kinds),
            pre_norm=True,
            qkv_bias=bias,
            out_bias=bias,
            norm_bias=reader.boolean("norm_bias", default=False),
        )
