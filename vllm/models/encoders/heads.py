"""Heads that follow an encoder, as data: the ending of the architecture's name says which row of its family it is."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from vllm.config.checkpoint.sentence_transformers import SPARSE_ENDING
from vllm.models.config_reader import ConfigReader

# Parts of an architecture's name, for rows of heads.
SEQUENCE, TOKENS, WORDS, LATE = "ForSequenceClassification", "ForTokenClassification", SPARSE_ENDING, "ColBERT"

_WIDTHS = ("colbert_dim", "dim", "projection_dim")


@dataclass(frozen=True)
class HeadSpec:
    """A classification head, out(norm(act(dense(x)))), or a projection of all hidden states.

    Attributes:
        activation: None = out(x), without the layers before it.
        bias: of the dense layer.
        norm: whether there is a norm, with the encoder's epsilon and bias.
        of_vocabulary: whether its labels are the vocabulary's tokens, for sparse embeddings.
        is_tied: whether the weight of out is the table of tokens.
        projection: the width of embeddings of tokens, which are compared one by one (arXiv:2004.12832); 0 = classes.
    """

    activation: str | None = None
    bias: bool = True
    norm: bool = False
    of_vocabulary: bool = False
    is_tied: bool = False
    projection: int = 0


@dataclass(frozen=True)
class Head:
    """A row: what config.json makes of a head, by the reader and the encoder's activation, and the checkpoint's names,
    towards `head.dense`, `head.norm` and `head.out_proj`, or `model.projection`. Of a bias that a file has twice,
    `head.tied_bias` counts where `head.out_proj` is the table of tokens, and `head.own_bias` elsewhere."""

    describe: Callable[[ConfigReader, str], HeadSpec]
    renames: tuple[tuple[str, str], ...] = ()


def classes(activation: str | None, *renames: tuple[str, str]) -> Head:
    """A head of classes, with a dense layer if it has an activation."""
    return Head(lambda reader, _: HeadSpec(activation), renames)


def words(*renames: tuple[str, str], activation: str | None = None) -> Head:
    """A head of masked words, for SPLADE (arXiv:2109.10086), which embeds a text by the words that it names;
    `activation` is the encoder's if None."""
    return Head(lambda reader, own: words_spec(reader, activation or own), renames)


def words_spec(reader: ConfigReader, activation: str, bias: bool = True) -> HeadSpec:
    """The spec of `words`; config.json says whether its weight is tied."""
    is_tied = reader.boolean("tie_word_embeddings", default=True)
    return HeadSpec(activation, bias, norm=True, of_vocabulary=True, is_tied=is_tied)


def _late(reader: ConfigReader, _: str) -> HeadSpec:
    return HeadSpec(projection=reader.get(*_WIDTHS) or 128)


OUTPUT = (r"^classifier\.", "head.out_proj.")
# On what BERT calls the pooler.
ON_POOLER = classes("tanh", (r"^pooler\.dense\.", "head.dense."), OUTPUT)
PLAIN = classes(None, OUTPUT)
LATE_INTERACTION = Head(_late, ((r"^linear\.", "model.projection."),))
