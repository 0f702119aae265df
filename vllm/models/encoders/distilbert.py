"""DistilBERT (arXiv:1910.01108): BERT without token types."""

from __future__ import annotations

from dataclasses import replace

from vllm.models.checkpoint_names import CheckpointNames
from vllm.models.config_reader import ConfigReader
from vllm.models.encoders.encoder import EncoderForPooling, EncoderSpec, HeadSpec

_RENAMES = (
    (r"^distilbert\.", ""),
    (r"^embeddings\.", "model.embeddings."),
    (r"^transformer\.layer\.", "model.layers."),
    (r"\.attention\.([qkv])_lin\.", r".\1_proj."),
    (r"\.attention\.out_lin\.", ".o_proj."),
    (r"\.sa_layer_norm\.", ".attention_norm."),
    (r"\.ffn\.lin1\.", ".up_proj."),
    (r"\.ffn\.lin2\.", ".down_proj."),
    (r"\.output_layer_norm\.", ".output_norm."),
    (r"^pre_classifier\.", "head.dense."),
    (r"^classifier\.", "head.out_proj."),
)


class DistilBertModel(EncoderForPooling):
    names = CheckpointNames(_RENAMES, ignored=r".*embeddings\.position_ids")

    @classmethod
    def describe(cls, reader: ConfigReader) -> EncoderSpec:
        # Tables of sines are in the checkpoint, as learned ones are.
        reader.ignore("sinusoidal_pos_embds", "intermediate_size", "tie_weights_")
        mlp = reader.mlp("gelu", sizes=(reader.integer("hidden_dim", default=3072),))
        return EncoderSpec(
            vocab_size=reader.integer("vocab_size"),
            hidden_size=reader.hidden_size,
            num_layers=reader.num_layers,
            num_heads=reader.num_heads,
            intermediate_size=mlp.intermediate_size,
            activation=mlp.activation,
            eps=1e-12,
            num_positions=reader.integer("max_position_embeddings", default=512),
        )


class DistilBertForSequenceClassification(DistilBertModel):
    @classmethod
    def describe(cls, reader: ConfigReader) -> EncoderSpec:
        return replace(super().describe(reader), head=HeadSpec("relu"))


class DistilBertForTokenClassification(DistilBertModel):
    @classmethod
    def describe(cls, reader: ConfigReader) -> EncoderSpec:
        return replace(super().describe(reader), head=HeadSpec())
