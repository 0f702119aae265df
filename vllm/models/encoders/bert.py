"""BERT (arXiv:1810.04805), RoBERTa and XLM-RoBERTa; MiniLM, E5 and BGE are such models."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import torch
from torch import Tensor

from vllm.models.checkpoint_names import CheckpointNames, split_evenly
from vllm.models.config_reader import ConfigReader
from vllm.models.encoders.encoder import EncoderForPooling, EncoderSpec, encoder
from vllm.models.encoders.heads import (
    LATE,
    LATE_INTERACTION,
    ON_POOLER,
    PLAIN,
    SEQUENCE,
    TOKENS,
    WORDS,
    Head,
    classes,
    words,
)

BERT_RENAMES = (
    (r"^(bert|roberta)\.", ""),
    (r"\.gamma$", ".weight"),
    (r"\.beta$", ".bias"),
    (r"^embeddings\.", "model.embeddings."),
    (r"^encoder\.layer\.", "model.layers."),
    (r"\.attention\.self\.query\.", ".q_proj."),
    (r"\.attention\.self\.key\.", ".k_proj."),
    (r"\.attention\.self\.value\.", ".v_proj."),
    (r"\.attention\.output\.dense\.", ".o_proj."),
    (r"\.attention\.output\.LayerNorm\.", ".attention_norm."),
    (r"\.intermediate\.dense\.", ".mlp.up_proj."),
    (r"\.output\.dense\.", ".mlp.down_proj."),
    (r"\.output\.LayerNorm\.", ".output_norm."),
)
IGNORED = r".*embeddings\.position_ids"
# Names of RoBERTas written for FlashAttention, as Jina's are.
_FLASH_RENAMES = (
    (r"^emb_ln\.", "model.embeddings.LayerNorm."),
    (r"^encoder\.layers\.", "model.layers."),
    (r"\.mixer\.Wqkv\.", ".qkv_proj."),
    (r"\.mixer\.out_proj\.", ".o_proj."),
    (r"\.mlp\.fc1\.", ".mlp.up_proj."),
    (r"\.mlp\.fc2\.", ".mlp.down_proj."),
    (r"\.norm1\.", ".attention_norm."),
    (r"\.norm2\.", ".output_norm."),
)
ROBERTA_NAMES = CheckpointNames(
    (*BERT_RENAMES, *_FLASH_RENAMES), (split_evenly("qkv_proj", "q_proj", "k_proj", "v_proj"),), ignored=IGNORED
)
ROBERTA_CLASSES = classes("tanh", (r"^classifier\.", "head."))
_WORDS = words(
    (r"^cls\.predictions\.transform\.dense\.", "head.dense."),
    (r"^cls\.predictions\.transform\.LayerNorm\.", "head.norm."),
    (r"^cls\.predictions\.bias$", "head.tied_bias"),
    (r"^cls\.predictions\.decoder\.bias$", "head.own_bias"),
    (r"^cls\.predictions\.decoder\.weight$", "head.out_proj.weight"),
)
_ROBERTA_WORDS = words(
    (r"^lm_head\.dense\.", "head.dense."),
    (r"^lm_head\.layer_norm\.", "head.norm."),
    (r"^lm_head\.bias$", "head.tied_bias"),
    (r"^lm_head\.decoder\.bias$", "head.own_bias"),
    (r"^lm_head\.decoder\.weight$", "head.out_proj.weight"),
    activation="gelu",
)


class BertModel(EncoderForPooling):
    names = CheckpointNames(BERT_RENAMES, ignored=IGNORED)
    heads: ClassVar[dict[str, Head]] = {SEQUENCE: ON_POOLER, TOKENS: PLAIN, WORDS: _WORDS, LATE: LATE_INTERACTION}

    @classmethod
    def describe(cls, reader: ConfigReader) -> EncoderSpec:
        return cls._describe(reader, 0)

    @staticmethod
    def _describe(reader: ConfigReader, position_offset: int) -> EncoderSpec:
        if reader.get("position_embedding_type", default="absolute") != "absolute":
            raise reader.refuse("position_embedding_type", "positions must be absolute")
        if reader.get("is_decoder", default=False):
            raise reader.refuse("is_decoder", "the model is an encoder")
        # Files made by TensorFlow's code name a direction, which it lets one choose.
        reader.only("directionality", "bidi")
        reader.only("pooler_type", "first_token_transform")
        reader.ignore("pooler_fc_size", "pooler_num_attention_heads", "pooler_num_fc_layers", "pooler_size_per_head")
        return encoder(
            reader,
            reader.mlp("gelu", bias=True, gated=False),
            eps=reader.number("layer_norm_eps", default=1e-12),
            num_positions=reader.integer("max_position_embeddings", default=512),
            position_offset=position_offset,
            num_types=reader.integer("type_vocab_size", default=2),
        )


class RobertaModel(BertModel):
    """BERT whose positions begin after the padding token's id. A padding token inside a text has that row, and is not
    counted."""

    names = ROBERTA_NAMES
    heads: ClassVar[dict[str, Head]] = {SEQUENCE: ROBERTA_CLASSES, TOKENS: PLAIN, WORDS: _ROBERTA_WORDS}

    @classmethod
    def describe(cls, reader: ConfigReader) -> EncoderSpec:
        reader.ignore("emb_pooler")
        padding = reader.get("pad_token_id", default=1)
        return cls._describe(reader, padding + 1)

    def rows_of(self, ids: Tensor, positions: Tensor, lengths: Sequence[int]) -> Tensor:
        is_padding = ids == self.spec.position_offset - 1
        if not is_padding.any():
            return positions
        parts = (~is_padding).long().split(list(lengths))
        return torch.cat([part.cumsum(0) for part in parts]).sub_(1).masked_fill_(is_padding, -1)
