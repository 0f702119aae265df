"""SPLADE (arXiv:2109.10086): encoders that embed a text by the words that their heads of masked words name."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from torch import Tensor

from vllm.models.checkpoint_names import CheckpointNames
from vllm.models.config_reader import ConfigReader
from vllm.models.encoders.bert import BERT_RENAMES, IGNORED, BertModel, RobertaModel, roberta_names
from vllm.models.encoders.distilbert import DistilBertModel
from vllm.models.encoders.encoder import EncoderForPooling, EncoderSpec, HeadSpec
from vllm.models.encoders.modernbert import ModernBertModel

_BERT_HEAD = (
    (r"^cls\.predictions\.transform\.dense\.", "head.dense."),
    (r"^cls\.predictions\.transform\.LayerNorm\.", "head.norm."),
    (r"^cls\.predictions\.bias$", "head.tied_bias"),
    (r"^cls\.predictions\.decoder\.bias$", "head.own_bias"),
    (r"^cls\.predictions\.decoder\.weight$", "head.out_proj.weight"),
)
_ROBERTA_HEAD = (
    (r"^lm_head\.dense\.", "head.dense."),
    (r"^lm_head\.layer_norm\.", "head.norm."),
    (r"^lm_head\.bias$", "head.tied_bias"),
    (r"^lm_head\.decoder\.bias$", "head.own_bias"),
    (r"^lm_head\.decoder\.weight$", "head.out_proj.weight"),
)
_DISTILBERT_HEAD = (
    (r"^vocab_transform\.", "head.dense."),
    (r"^vocab_layer_norm\.", "head.norm."),
    (r"^vocab_projector\.", "head.out_proj."),
)


def _words(reader: ConfigReader, activation: str, bias: bool = True) -> HeadSpec:
    is_tied = reader.boolean("tie_word_embeddings", default=True)
    return HeadSpec(activation, bias, norm=True, of_vocabulary=True, is_tied=is_tied)


class _TwoBiases(EncoderForPooling):
    """Words have two biases in a file, which are one where the weight is the table of tokens."""

    def checkpoint_tensors(self, name: str, tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
        assert self.spec.head is not None
        used = "head.tied_bias" if self.spec.head.is_tied else "head.own_bias"
        for own, values in super().checkpoint_tensors(name, tensor):
            if not own.endswith("_bias"):
                yield own, values
            elif own == used:
                yield "head.out_proj.bias", values


class BertSpladeSparseEmbeddingModel(_TwoBiases, BertModel):
    names = CheckpointNames((*BERT_RENAMES, *_BERT_HEAD), ignored=IGNORED)

    @classmethod
    def describe(cls, reader: ConfigReader) -> EncoderSpec:
        spec = super().describe(reader)
        return replace(spec, head=_words(reader, spec.activation))


class RobertaSpladeSparseEmbeddingModel(_TwoBiases, RobertaModel):
    names = roberta_names(*_ROBERTA_HEAD)

    @classmethod
    def describe(cls, reader: ConfigReader) -> EncoderSpec:
        return replace(super().describe(reader), head=_words(reader, "gelu"))


class DistilBertSpladeSparseEmbeddingModel(DistilBertModel):
    names = CheckpointNames((*DistilBertModel.names.renames, *_DISTILBERT_HEAD), ignored=IGNORED)

    @classmethod
    def describe(cls, reader: ConfigReader) -> EncoderSpec:
        spec = super().describe(reader)
        return replace(spec, head=_words(reader, spec.activation))


class ModernBertSpladeSparseEmbeddingModel(ModernBertModel):
    names = CheckpointNames(
        (*ModernBertModel.names.renames, (r"^decoder\.", "head.out_proj.")), ModernBertModel.names.transforms
    )

    @classmethod
    def _head(cls, reader: ConfigReader) -> HeadSpec:
        if not reader.boolean("decoder_bias", default=True):
            raise reader.refuse("decoder_bias", "words must have a bias")
        activation = reader.get("classifier_activation", default="gelu")
        return _words(reader, activation, reader.boolean("classifier_bias", default=False))
