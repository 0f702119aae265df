"""Jina's BERT (arXiv:2310.19923), of jina-embeddings-v2: BERT with ALiBi to both sides and gated MLPs."""

from __future__ import annotations

from dataclasses import replace

from vllm.models.alibi import alibi_slopes
from vllm.models.checkpoint_names import CheckpointNames, split_evenly
from vllm.models.config_reader import ConfigReader
from vllm.models.encoders.bert import BERT_RENAMES, IGNORED
from vllm.models.encoders.encoder import EncoderForPooling, EncoderSpec, encoder

_RENAMES = (
    *BERT_RENAMES,
    (r"\.mlp\.gated_layers\.", ".mlp.gate_up_proj."),
    (r"\.mlp\.wo\.", ".mlp.down_proj."),
    (r"\.mlp\.layernorm\.", ".output_norm."),
)
_ACTIVATIONS = {"geglu": "gelu", "reglu": "relu"}


class JinaBertModel(EncoderForPooling):
    names = CheckpointNames(_RENAMES, (split_evenly("gate_up_proj", "gate_proj", "up_proj"),), ignored=IGNORED)

    @classmethod
    def describe(cls, reader: ConfigReader) -> EncoderSpec:
        reader.ignore("attn_implementation")
        if reader.get("emb_pooler", default="cls") not in ("cls", "mean"):
            raise reader.refuse("emb_pooler", "it must be cls or mean")
        if reader.get("position_embedding_type", default="alibi") != "alibi":
            raise reader.refuse("position_embedding_type", "positions of this architecture must be alibi")
        kind = reader.get("feed_forward_type", default="geglu")
        if kind not in (*_ACTIVATIONS, "original"):
            raise reader.refuse("feed_forward_type", "it must be original, geglu or reglu")
        is_plain = kind == "original"
        mlp = reader.mlp("gelu", bias=True, gated=not is_plain, up_bias=is_plain)
        mlp = replace(mlp, activation=_ACTIVATIONS.get(kind, mlp.activation))
        return encoder(
            reader,
            mlp,
            eps=reader.number("layer_norm_eps", default=1e-12),
            context=reader.integer("max_position_embeddings", default=512),
            num_types=reader.integer("type_vocab_size", default=2),
            alibi_slopes=alibi_slopes(reader.num_heads),
        )
