"""DistilBERT (arXiv:1910.01108): BERT without token types."""

from __future__ import annotations

from typing import ClassVar

from vllm.models.checkpoint_names import CheckpointNames
from vllm.models.config_reader import ConfigReader
from vllm.models.encoders.bert import IGNORED
from vllm.models.encoders.encoder import EncoderForPooling, EncoderSpec, encoder
from vllm.models.encoders.heads import OUTPUT, PLAIN, SEQUENCE, TOKENS, WORDS, Head, classes, words

_RENAMES = (
    (r"^distilbert\.", ""),
    (r"^embeddings\.", "model.embeddings."),
    (r"^transformer\.layer\.", "model.layers."),
    (r"\.attention\.([qkv])_lin\.", r".\1_proj."),
    (r"\.attention\.out_lin\.", ".o_proj."),
    (r"\.sa_layer_norm\.", ".attention_norm."),
    (r"\.ffn\.lin1\.", ".mlp.up_proj."),
    (r"\.ffn\.lin2\.", ".mlp.down_proj."),
    (r"\.output_layer_norm\.", ".output_norm."),
)


class DistilBertModel(EncoderForPooling):
    names = CheckpointNames(_RENAMES, ignored=IGNORED)
    heads: ClassVar[dict[str, Head]] = {
        SEQUENCE: classes("relu", (r"^pre_classifier\.", "head.dense."), OUTPUT),
        TOKENS: PLAIN,
        WORDS: words(
            (r"^vocab_transform\.", "head.dense."),
            (r"^vocab_layer_norm\.", "head.norm."),
            (r"^vocab_projector\.", "head.out_proj."),
        ),
    }

    @classmethod
    def describe(cls, reader: ConfigReader) -> EncoderSpec:
        # Tables of sines are in the checkpoint, as learned ones are.
        reader.ignore("sinusoidal_pos_embds", "intermediate_size", "tie_weights_")
        mlp = reader.mlp("gelu", bias=True, gated=False, sizes=(reader.integer("hidden_dim", default=3072),))
        return encoder(
            reader,
            mlp,
            eps=1e-12,
            num_positions=reader.integer("max_position_embeddings", default=512),
        )
