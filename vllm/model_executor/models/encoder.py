"""Bidirectional encoders: post-norm blocks over the tokens of several sequences, without padding."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from vllm.attention.options import AttentionOptions
from vllm.attention.packed import PackedSequences, attend_packed
from vllm.model_executor.layers.activation import get_act_fn
from vllm.model_executor.layers.layernorm import LayerNorm
from vllm.model_executor.layers.linear import (
    ColumnParallelLinear,
    QKVParallelLinear,
    ReplicatedLinear,
    RowParallelLinear,
)
from vllm.model_executor.layers.vocab_parallel_embedding import Embedding
from vllm.model_executor.layers.weight_update import UpdatableModel
from vllm.model_executor.models.checkpoint_names import CheckpointNames
from vllm.model_executor.models.config_reader import ConfigReader
from vllm.transformers_utils.config import HFConfig


@dataclass(frozen=True)
class EncoderSpec:
    """An encoder with learned positions.

    Attributes:
        num_positions: rows of the table of positions, of which row p + position_offset belongs to position p.
        num_types: rows of the table of token types; 0 = there is none.
    """

    vocab_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    intermediate_size: int
    activation: str
    eps: float
    num_positions: int
    position_offset: int = 0
    num_types: int = 0

    @property
    def max_positions(self) -> int:
        """The longest sequence in tokens."""
        return self.num_positions - self.position_offset


@dataclass(frozen=True)
class HeadSpec:
    """A classification head on the first token: out(act(dense(x)))."""

    num_labels: int
    activation: str


class EncoderEmbeddings(nn.Module):
    """Tokens, positions and types, added and normalised."""

    def __init__(self, spec: EncoderSpec) -> None:
        super().__init__()
        self.offset = spec.position_offset
        self.word_embeddings = Embedding(spec.vocab_size, spec.hidden_size)
        self.position_embeddings = Embedding(spec.num_positions, spec.hidden_size)
        self.token_type_embeddings = Embedding(spec.num_types, spec.hidden_size) if spec.num_types else None
        self.LayerNorm = LayerNorm(spec.hidden_size, spec.eps, bias=True)

    def forward(self, ids: Tensor, positions: Tensor, types: Tensor) -> Tensor:
        hidden = self.word_embeddings(ids)
        if self.token_type_embeddings is not None:
            hidden = hidden + self.token_type_embeddings(types)
        return self.LayerNorm(hidden + self.position_embeddings(positions + self.offset))


class EncoderLayer(nn.Module):
    """Attention and MLP, each added to its input and normalised."""

    def __init__(self, spec: EncoderSpec) -> None:
        super().__init__()
        hidden, head_dim = spec.hidden_size, spec.hidden_size // spec.num_heads
        self.head_dim = head_dim
        self.qkv_proj = QKVParallelLinear(hidden, head_dim, spec.num_heads, spec.num_heads, True)
        self.o_proj = RowParallelLinear(hidden, hidden, True, "o_proj")
        self.attention_norm = LayerNorm(hidden, spec.eps, bias=True)
        self.up_proj = ColumnParallelLinear(hidden, spec.intermediate_size, True, "up_proj")
        self.act_fn = get_act_fn(spec.activation)
        self.down_proj = RowParallelLinear(spec.intermediate_size, hidden, True, "down_proj")
        self.output_norm = LayerNorm(hidden, spec.eps, bias=True)

    def forward(self, hidden: Tensor, sequences: PackedSequences) -> Tensor:
        q, k, v = self.qkv_proj(hidden).view(len(hidden), 3, -1, self.head_dim).unbind(1)
        attended = attend_packed(q, k, v, sequences, AttentionOptions()).flatten(1)
        hidden = self.attention_norm(hidden + self.o_proj(attended))
        return self.output_norm(hidden + self.down_proj(self.act_fn(self.up_proj(hidden))))


class Encoder(nn.Module):
    def __init__(self, spec: EncoderSpec) -> None:
        super().__init__()
        self.embeddings = EncoderEmbeddings(spec)
        self.layers = nn.ModuleList(EncoderLayer(spec) for _ in range(spec.num_layers))
        self.projection: nn.Module | None = None

    def forward(self, ids: Tensor, positions: Tensor, types: Tensor, lengths: Sequence[int]) -> Tensor:
        hidden, sequences = self.embeddings(ids, positions, types), PackedSequences(lengths)
        for layer in self.layers:
            hidden = layer(hidden, sequences)
        return hidden if self.projection is None else self.projection(hidden)


class ClassificationHead(nn.Module):
    def __init__(self, spec: HeadSpec, hidden_size: int) -> None:
        super().__init__()
        self.dense = ReplicatedLinear(hidden_size, hidden_size, True, "dense")
        self.act_fn: Callable[[Tensor], Tensor] = (
            torch.tanh if spec.activation == "tanh" else get_act_fn(spec.activation)
        )
        self.out_proj = ReplicatedLinear(hidden_size, spec.num_labels, True, "out_proj")

    def forward(self, first: Tensor) -> Tensor:
        """Hidden states of first tokens [R, H] -> logits [R, labels]."""
        return self.out_proj(self.act_fn(self.dense(first)))


class EncoderForPooling(UpdatableModel):
    """An encoder, with a classification head where the architecture has one. A family derives from it with its
    `describe` and the `names` of its checkpoints."""

    names: ClassVar[CheckpointNames] = CheckpointNames()
    head_activation: ClassVar[str | None] = None
    """Of the classification head; None: there is none."""

    @classmethod
    def describe(cls, reader: ConfigReader) -> EncoderSpec:
        """The encoder that config.json means."""
        raise NotImplementedError

    @classmethod
    def spec_of(cls, config: HFConfig) -> EncoderSpec:
        """`describe`, for a config without unknown options. ValueError names one."""
        reader = ConfigReader(config)
        spec = cls.describe(reader)
        reader.ignore("num_labels", "sbert_ce_default_activation_function", "sentence_transformers")
        reader.ignore("tie_word_embeddings", "max_position_embeddings", "vocab_size")
        reader.check_all_read(cls.__name__)
        if spec.hidden_size % spec.num_heads:
            raise ValueError(f"{config.where}: hidden_size must be a multiple of num_attention_heads={spec.num_heads}")
        return spec

    @classmethod
    def resolve_config(cls, config: HFConfig) -> HFConfig:
        """`config` with the sizes of the encoder that it means. ValueError as `spec_of`."""
        spec = cls.spec_of(config)
        return replace(
            config,
            intermediate_size=spec.intermediate_size,
            max_context_len=spec.max_positions,
            is_encoder=True,
        )

    def __init__(self, config: HFConfig, max_model_len: int) -> None:
        super().__init__()
        self.spec = self.spec_of(config)
        self.model, self._like = Encoder(self.spec), torch.empty(0)
        self.head: ClassificationHead | None = None
        if self.head_activation is not None:
            self.head = ClassificationHead(HeadSpec(config.num_labels, self.head_activation), self.spec.hidden_size)

    def forward(self, ids: Tensor, positions: Tensor, types: Tensor, lengths: Sequence[int]) -> Tensor:
        """Final hidden states [T, H] of sequences that follow one another.

        Args:
            ids, types: token ids and token types, int64 [T].
            positions: of each token in its sequence, int64 [T].
            lengths: of the sequences, T together.
        """
        return self.model(ids, positions, types, lengths)

    def classify(self, first: Tensor) -> Tensor:
        """Hidden states of first tokens [R, H] -> logits, float32 [R, labels]."""
        assert self.head is not None
        return self.head(first.to(self._like.dtype)).float()

    def checkpoint_tensors(self, name: str, tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
        """Our names and tensors of a checkpoint's one."""
        spec: Any = self.spec
        for own, values in self.names.read(name, tensor, spec):
            if own.startswith("model.") or (self.head is not None and own.startswith("head.")):
                yield own, values
