"""Bidirectional encoders over the tokens of several sequences, without padding."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from vllm.attention.options import AttentionOptions
from vllm.attention.packed import PackedSequences, attend_packed
from vllm.config.checkpoint.config import HFConfig
from vllm.distributed.parallel_state import get_tp_group
from vllm.layers.activation import get_act_fn
from vllm.layers.layernorm import LayerNorm
from vllm.layers.linear import (
    QKVParallelLinear,
    ReplicatedLinear,
    RowParallelLinear,
)
from vllm.layers.rotary_embedding import RotaryEmbedding
from vllm.layers.sharding import Shard
from vllm.layers.vocab_parallel_embedding import Embedding
from vllm.layers.weight_update import UpdatableModel
from vllm.models.checkpoint_names import CheckpointNames
from vllm.models.config_reader import ConfigReader
from vllm.models.encoders.heads import ON_POOLER, PLAIN, SEQUENCE, TOKENS, Head, HeadSpec
from vllm.models.mlp import MLP
from vllm.models.spec import MlpSpec, RotarySpec
from vllm.ops.rotary import rotary_embedding_

_HEAD_WEIGHT, _HEAD_BIAS = "head.out_proj.weight", "head.out_proj.bias"
# Names of a bias that a file has twice; the value: whether it is the head's if its weight is the table of tokens.
_BIASES = {"head.tied_bias": True, "head.own_bias": False}


@dataclass(frozen=True)
class EncoderSpec:
    """An encoder.

    Attributes:
        num_positions: rows of the table of positions, of which row p + position_offset belongs to position p; 0 = there
            is none.
        context: the longest sequence in tokens where there is no table of positions.
        num_types: rows of the table of token types; 0 = there is none.
        rotary, windows: of each layer; empty = of none. A window of w reaches w - 1 tokens to either side.
        alibi_slopes: of each head: slope * -|key's position - query's| is added to scores.
        pre_norm: whether norms are before attention and MLP, the first layer has none before attention, and one
            follows the last layer; else they are after the sum.
        qkv_bias, out_bias, norm_bias: which layers have a bias.
    """

    vocab_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    mlp: MlpSpec
    eps: float
    num_positions: int = 0
    position_offset: int = 0
    context: int = 0
    num_types: int = 0
    rotary: tuple[RotarySpec, ...] = ()
    windows: tuple[int | None, ...] = ()
    alibi_slopes: tuple[float, ...] = ()
    pre_norm: bool = False
    qkv_bias: bool = True
    out_bias: bool = True
    norm_bias: bool = True
    head: HeadSpec | None = None

    @property
    def max_positions(self) -> int:
        """The longest sequence in tokens."""
        return self.num_positions - self.position_offset if self.num_positions else self.context

    @property
    def projection(self) -> int:
        """The width of projected hidden states; 0: they are not."""
        return 0 if self.head is None else self.head.projection


def encoder(reader: ConfigReader, mlp: MlpSpec, **fields: Any) -> EncoderSpec:
    """The whole, with the sizes that all families call the same."""
    return EncoderSpec(
        vocab_size=reader.integer("vocab_size"),
        hidden_size=reader.hidden_size,
        num_layers=reader.num_layers,
        num_heads=reader.num_heads,
        mlp=mlp,
        **fields,
    )


class EncoderEmbeddings(nn.Module):
    """Tokens, positions and types, added and normalised."""

    def __init__(self, spec: EncoderSpec) -> None:
        super().__init__()
        self.offset = spec.position_offset
        self.word_embeddings = Embedding(spec.vocab_size, spec.hidden_size)
        self.position_embeddings = Embedding(spec.num_positions, spec.hidden_size) if spec.num_positions else None
        self.token_type_embeddings = Embedding(spec.num_types, spec.hidden_size) if spec.num_types else None
        self.LayerNorm = LayerNorm(spec.hidden_size, spec.eps, bias=spec.norm_bias)

    def forward(self, ids: Tensor, positions: Tensor, types: Tensor) -> Tensor:
        hidden = self.word_embeddings(ids)
        if self.token_type_embeddings is not None:
            hidden = hidden + self.token_type_embeddings(types)
        if self.position_embeddings is not None:
            hidden = hidden + self.position_embeddings(positions + self.offset)
        return self.LayerNorm(hidden)


class EncoderLayer(nn.Module):
    """Attention and MLP, each added to its input, with a norm after the sum or before them."""

    def __init__(self, spec: EncoderSpec, index: int, rotary: RotaryEmbedding | None) -> None:
        super().__init__()
        hidden, self.head_dim = spec.hidden_size, spec.hidden_size // spec.num_heads
        self.pre_norm, self.rotary = spec.pre_norm, rotary
        heads = Shard.even(spec.num_heads, get_tp_group()).held
        own_slopes = spec.alibi_slopes[heads.start : heads.stop]
        slopes = torch.tensor(own_slopes, dtype=torch.float32) if own_slopes else None
        window = spec.windows[index] if spec.windows else None
        self.options = AttentionOptions(window=window, alibi_slopes=slopes)
        self.qkv_proj = QKVParallelLinear(hidden, self.head_dim, spec.num_heads, spec.num_heads, spec.qkv_bias)
        self.o_proj = RowParallelLinear(hidden, hidden, spec.out_bias, "o_proj")
        has_norm = index > 0 or not spec.pre_norm
        self.attention_norm: Any = LayerNorm(hidden, spec.eps, bias=spec.norm_bias) if has_norm else nn.Identity()
        self.mlp = MLP(spec.mlp, hidden)
        self.output_norm = LayerNorm(hidden, spec.eps, bias=spec.norm_bias)

    def forward(self, hidden: Tensor, positions: Tensor, sequences: PackedSequences) -> Tensor:
        if self.pre_norm:
            attended = self._attend(self.attention_norm(hidden), positions, sequences)
            return self.mlp(self.output_norm.add(attended, hidden)).add_(hidden)
        hidden = self.attention_norm.add(self._attend(hidden, positions, sequences), hidden)
        return self.output_norm.add(self.mlp(hidden), hidden)

    def _attend(self, hidden: Tensor, positions: Tensor, sequences: PackedSequences) -> Tensor:
        q, k, v = self.qkv_proj(hidden).view(len(hidden), 3, -1, self.head_dim).unbind(1)
        if self.rotary is not None:
            rotary_embedding_(positions, q, k, self.rotary.cos_sin_cache)
        return self.o_proj(attend_packed(q, k, v, sequences, self.options).flatten(1))


class Encoder(nn.Module):
    def __init__(self, spec: EncoderSpec) -> None:
        super().__init__()
        self.embeddings = EncoderEmbeddings(spec)
        # One table for all layers of a kind.
        tables: dict[str, RotaryEmbedding] = {}
        for each in spec.rotary:
            tables.setdefault(repr(each), RotaryEmbedding(each.dim, spec.max_positions, each.rope))
        rotary: list[Any] = [tables[repr(each)] for each in spec.rotary] or [None] * spec.num_layers
        self.layers = nn.ModuleList(EncoderLayer(spec, index, rotary[index]) for index in range(spec.num_layers))
        self.final_norm = LayerNorm(spec.hidden_size, spec.eps, bias=spec.norm_bias) if spec.pre_norm else None
        self.projection: nn.Module | None = None
        if spec.projection:
            self.projection = ReplicatedLinear(spec.hidden_size, spec.projection, False, "projection")

    def forward(self, ids: Tensor, positions: Tensor, types: Tensor, sequences: PackedSequences) -> Tensor:
        hidden = self.embeddings(ids, positions, types)
        for layer in self.layers:
            hidden = layer(hidden, positions, sequences)
        if self.final_norm is not None:
            hidden = self.final_norm(hidden)
        return hidden if self.projection is None else self.projection(hidden)


class ClassificationHead(nn.Module):
    def __init__(self, head: HeadSpec, spec: EncoderSpec, num_labels: int) -> None:
        super().__init__()
        size = spec.hidden_size
        if head.activation is not None:
            self.dense = ReplicatedLinear(size, size, head.bias, "dense")
            self.act_fn = get_act_fn(head.activation)
        self.has_dense = head.activation is not None
        self.norm = LayerNorm(size, spec.eps, bias=spec.norm_bias) if head.norm else None
        self.out_proj = ReplicatedLinear(size, num_labels, True, "out_proj")

    def forward(self, rows: Tensor) -> Tensor:
        """Hidden states [R, H] -> logits [R, labels]."""
        if self.has_dense:
            rows = self.act_fn(self.dense(rows))
        return self.out_proj(rows if self.norm is None else self.norm(rows))


class EncoderForPooling(UpdatableModel):
    """An encoder, with the head that the architecture has. A family derives from it with its `describe`, the `names` of
    its checkpoints, and its `heads`: by what is in an architecture's name, what it has."""

    names: ClassVar[CheckpointNames] = CheckpointNames()
    heads: ClassVar[dict[str, Head]] = {SEQUENCE: ON_POOLER, TOKENS: PLAIN}

    @classmethod
    def describe(cls, reader: ConfigReader) -> EncoderSpec:
        """The encoder that config.json means."""
        raise NotImplementedError

    @classmethod
    def head_of(cls, config: HFConfig) -> Head | None:
        """The architecture's row of `heads`."""
        return next((cls.heads[key] for name in config.architectures for key in cls.heads if key in name), None)

    @classmethod
    def spec_of(cls, config: HFConfig) -> EncoderSpec:
        """`describe`, for a config without unknown options, with the architecture's head. ValueError names one."""
        reader = ConfigReader(config)
        spec = cls.describe(reader)
        if (head := cls.head_of(config)) is not None:
            spec = replace(spec, head=head.describe(reader, spec.mlp.activation))
        reader.ignore("num_labels", "sbert_ce_default_activation_function", "sentence_transformers")
        reader.ignore("tie_word_embeddings", "max_position_embeddings", "vocab_size")
        reader.check_all_read(cls)
        if spec.hidden_size % spec.num_heads:
            raise ValueError(f"{config.where}: hidden_size must be a multiple of num_attention_heads={spec.num_heads}")
        return spec

    @classmethod
    def resolve_config(cls, config: HFConfig) -> HFConfig:
        """`config` with the sizes of the encoder that it means. ValueError as `spec_of`."""
        spec = cls.spec_of(config)
        return replace(
            config,
            hidden_size=spec.projection or config.hidden_size,
            intermediate_size=spec.mlp.intermediate_size,
            max_context_len=spec.max_positions,
            is_encoder=True,
        )

    def __init__(self, config: HFConfig, max_model_len: int) -> None:
        super().__init__()
        self.spec = spec = self.spec_of(config)
        head = self.head_of(config)
        renames = () if head is None else head.renames
        self._names = replace(self.names, renames=(*self.names.renames, *renames))
        self.model, self._like = Encoder(spec), torch.empty(0)
        self.head: ClassificationHead | None = None
        if spec.head is not None and not spec.projection:
            num_labels = spec.vocab_size if spec.head.of_vocabulary else config.num_labels
            self.head = ClassificationHead(spec.head, spec, num_labels)

    def forward(
        self,
        ids: Tensor,
        positions: Tensor,
        types: Tensor,
        lengths: Sequence[int],
        attended: Sequence[int] | None = None,
    ) -> Tensor:
        """Final hidden states [T, H] of sequences that follow one another.

        Args:
            ids, types: token ids and token types, int64 [T].
            positions: of each token in its sequence, int64 [T].
            lengths: of the sequences, T together.
            attended: how many of each sequence's first tokens are seen by all of them; None: all are.
        """
        return self.model(ids, self.rows_of(ids, positions, lengths), types, PackedSequences(lengths, attended))

    def rows_of(self, ids: Tensor, positions: Tensor, lengths: Sequence[int]) -> Tensor:
        """The position whose row of the table each token has, int64 [T]."""
        return positions

    def classify(self, rows: Tensor) -> Tensor:
        """Hidden states of sequences or of tokens [R, H] -> logits, float32 [R, labels]."""
        assert self.head is not None
        return self.head(rows.to(self._like.dtype)).float()

    def checkpoint_tensors(self, name: str, tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
        """Our names and tensors of a checkpoint's one."""
        spec: Any = self.spec
        is_tied = spec.head is not None and spec.head.is_tied
        for own, values in self._names.read(name, tensor, spec):
            if own in _BIASES:
                own = _HEAD_BIAS if _BIASES[own] == is_tied else ""
            is_known = own.startswith("model.") or (self.head is not None and own.startswith("head."))
            if is_known and not (is_tied and own == _HEAD_WEIGHT):
                yield own, values
            if own == "model.embeddings.word_embeddings.weight" and is_tied:
                yield _HEAD_WEIGHT, values
