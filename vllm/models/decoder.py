"""The dense decoder: one block, composed as a DecoderSpec says."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from functools import cache, partial
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from vllm.attention.backend import AttentionMetadata, KVCache
from vllm.config.checkpoint.config import HFConfig
from vllm.config.checkpoint.text_part import MARK, text_tensor_name
from vllm.distributed.parallel_state import get_tp_group
from vllm.layers.activation import XIELU, SparseActAndMul, get_inplace_act_fn
from vllm.layers.attention import Attention, AttentionOptions
from vllm.layers.layernorm import HeadLayerNorms, LayerNorm, RMSNorm, ShardedRMSNorm
from vllm.layers.linear import (
    ColumnParallelLinear,
    GatedLinear,
    QKVParallelLinear,
    ReplicatedLinear,
    RowParallelLinear,
    separate_pair_columns,
)
from vllm.layers.rotary_embedding import RotaryEmbedding
from vllm.layers.sharding import Shard, WeightSlot
from vllm.layers.vocab_parallel_embedding import Embedding, ParallelLMHead, VocabParallelEmbedding
from vllm.layers.weight_update import UpdatableModel
from vllm.models.checkpoint_names import CheckpointNames
from vllm.models.config_reader import ConfigReader
from vllm.models.norms import Norm, make_norm
from vllm.models.per_layer_inputs import LayerInput, PerLayerInputs
from vllm.models.spec import AttentionSpec, DecoderSpec, MlpSpec, RotarySpec
from vllm.ops.elementwise import added, scaled
from vllm.ops.embedding import embedding
from vllm.ops.rms_norm import AddedNorm
from vllm.ops.rotary import rotary_embedding_


class RotaryTables:
    """The rotary embeddings of a model: layers with equal options share one table."""

    def __init__(self, max_positions: int) -> None:
        self._max_positions = max_positions
        self._made: list[tuple[RotarySpec, RotaryEmbedding]] = []

    def get(self, spec: RotarySpec) -> RotaryEmbedding:
        """The table of `spec`."""
        for other, rotary in self._made:
            if other == spec:
                return rotary
        rotary = RotaryEmbedding(spec.dim, self._max_positions, spec.rope)
        self._made.append((spec, rotary))
        return rotary


class DecoderAttention(nn.Module):
    """Self-attention."""

    def __init__(self, spec: AttentionSpec, hidden_size: int, tables: RotaryTables) -> None:
        super().__init__()
        self.head_dim = spec.head_dim
        self.clip, self.query_growth = spec.clip, spec.query_growth
        self.rotates_first = spec.qk_norm_after_rotary or spec.query_growth is not None
        interleaved = spec.rotary.dim if spec.rotary is not None and spec.rotary.interleaved else 0
        self.value_is_key = spec.value_is_key
        names = ["q_proj", "k_proj", "v_proj"] if spec.kv_source is None else ["q_proj"]
        if spec.value_is_key and spec.kv_source is None:
            names.remove("v_proj")
        self.qkv_proj = QKVParallelLinear(
            hidden_size, spec.head_dim, spec.num_heads, spec.num_kv_heads, spec.qkv_bias, interleaved, names
        )
        width = spec.num_heads * spec.head_dim
        self.o_proj = RowParallelLinear(width, hidden_size, spec.o_bias, "o_proj")
        self.q_norm: nn.Module | None = None
        self.k_norm: nn.Module | None = None
        if spec.qk_norm is not None:
            self.q_norm = self._qk_norm(spec, spec.num_heads)
            self.k_norm = self._qk_norm(spec, spec.num_kv_heads) if spec.kv_source is None else None
        self.v_norm: nn.Module | None = None
        if spec.v_norm is not None and spec.kv_source is None:
            self.v_norm = make_norm(spec.v_norm, spec.head_dim)
        self.sub_norm: nn.Module | None = None
        if spec.output_norm is not None:
            self.sub_norm = ShardedRMSNorm(Shard.even(width, get_tp_group()), spec.output_norm.eps, get_tp_group(), 1)
        self.rotary = None if spec.rotary is None else tables.get(spec.rotary)
        held = self.qkv_proj.parts["q_proj"].held
        self._heads = Shard(spec.num_heads, range(held.start // spec.head_dim, held.stop // spec.head_dim))
        self.sinks: nn.Parameter | None = None
        if spec.sinks:
            sinks = torch.empty(len(self._heads.held), dtype=torch.float32)
            self.sinks = nn.Parameter(sinks, requires_grad=False)
        self.attn = Attention(
            spec.head_dim,
            rotary=None if self.rotates_first else self.rotary,
            options=self._options(spec),
            num_kv_heads=None if spec.kv_source is not None else self.qkv_proj.head_counts[1],
            kv_sharing_target=spec.kv_source,
        )

    def _options(self, spec: AttentionSpec) -> AttentionOptions:
        slopes = None
        if spec.alibi_slopes is not None:
            slopes = torch.tensor([spec.alibi_slopes[head] for head in self._heads.held], dtype=torch.float32)
        return AttentionOptions(spec.scale, spec.window, spec.softcap, slopes, self.sinks)

    def checkpoint_slots(self) -> dict[str, WeightSlot]:
        """Where the checkpoint's sinks go."""
        return {} if self.sinks is None else {"sinks": WeightSlot(self.sinks.data, (self._heads,))}

    def _qk_norm(self, spec: AttentionSpec, num_heads: int) -> nn.Module:
        assert spec.qk_norm is not None
        if spec.qk_norm_over == "head":
            return self._prepared(make_norm(spec.qk_norm, spec.head_dim), spec)
        held = self.qkv_proj.parts["q_proj" if num_heads == spec.num_heads else "k_proj"]
        if spec.qk_norm_over in ("heads", "norms"):
            first, end = held.held.start // spec.head_dim, held.held.stop // spec.head_dim
            heads = Shard(num_heads, range(first, end))
            if spec.qk_norm_over == "norms":
                return HeadLayerNorms(spec.head_dim, spec.qk_norm.eps, heads)
            return self._prepared(make_norm(spec.qk_norm, spec.head_dim, heads), spec)
        group = get_tp_group()
        return ShardedRMSNorm(held, spec.qk_norm.eps, group, len(held.held) * group.world_size // held.size)

    @staticmethod
    def _prepared(norm: Norm, spec: AttentionSpec) -> Norm:
        """With its values in the order of the heads' rows, which QKVParallelLinear changes."""
        if spec.rotary is not None and spec.rotary.interleaved:
            norm.prepare = partial(separate_pair_columns, num_rotated=spec.rotary.dim)
        return norm

    def forward(
        self,
        positions: Tensor,
        hidden: Tensor,
        kv_cache: KVCache,
        attn: AttentionMetadata,
        rows: Tensor | None,
        norm: AddedNorm | None,
    ) -> Tensor:
        """[T, H], to which `norm` is applied first -> [T, H], or [L, H] for the tokens in `rows`."""
        qkv = self.qkv_proj(hidden, norm)
        if self.clip is not None:
            qkv = qkv.clamp(-self.clip, self.clip)
        q, k, v = self._heads_of(qkv, positions)
        out = self.attn(q, k, v, kv_cache, attn, rows, positions)
        return self.o_proj(out if self.sub_norm is None else self.sub_norm(out))

    def _heads_of(self, qkv: Tensor, positions: Tensor) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """The heads of the projections [T, width], each [T, heads, D], as attention takes them."""
        parts = qkv.view(qkv.shape[0], -1, self.head_dim).split(self.qkv_proj.head_counts, dim=1)
        q, k, v = (*parts, None, None)[:3]
        if self.value_is_key:
            v = k
        if self.rotates_first and self.rotary is not None:
            assert k is not None
            rotary_embedding_(positions, q, k, self.rotary.cos_sin_cache)
        if self.q_norm is not None:
            q = self.q_norm(q)
        if self.k_norm is not None:
            k = self.k_norm(k)
        if self.v_norm is not None:
            v = self.v_norm(v)
        if self.query_growth is not None:
            beta, length = self.query_growth
            q = q * (1 + beta * torch.log1p(positions.div(length, rounding_mode="floor")))[:, None, None].to(q.dtype)
        return q, k, v


class DecoderMLP(nn.Module):
    """down(act(gate(x)) * up(x)), or down(act(up(x)))."""

    def __init__(self, spec: MlpSpec, hidden_size: int) -> None:
        super().__init__()
        inner = spec.intermediate_size
        self.up_proj: nn.Module | None = None
        self.gate_up_proj: GatedLinear | None = None
        if spec.gated:
            self.gate_up_proj = GatedLinear(hidden_size, inner, spec.up_bias, spec.activation)
            if spec.sparsity:
                self.gate_up_proj.act_and_mul = SparseActAndMul(spec.activation, spec.sparsity, get_tp_group())
        else:
            self.up_proj = ColumnParallelLinear(hidden_size, inner, spec.up_bias, "up_proj")
            self.act_fn = XIELU() if spec.activation == "xielu" else get_inplace_act_fn(spec.activation)
        self.sub_norm: nn.Module | None = None
        if spec.inner_norm is not None:
            group = get_tp_group()
            self.sub_norm = ShardedRMSNorm(Shard.even(inner, group), spec.inner_norm.eps, group, 1)
        self.down_proj = RowParallelLinear(inner, hidden_size, spec.down_bias, "down_proj")

    def forward(self, x: Tensor, norm: AddedNorm | None) -> Tensor:
        """[T, H], to which `norm` is applied first -> [T, H]."""
        if self.gate_up_proj is not None:
            inner = self.gate_up_proj(x, norm)
        else:
            assert self.up_proj is not None
            inner = self.act_fn(self.up_proj(x, norm))
        return self.down_proj(inner if self.sub_norm is None else self.sub_norm(inner))


class DecoderLayer(nn.Module):
    """One block. What attention and MLP give is added to the residual stream by the next norm, which the product that
    follows applies: one operation for all three where the norm is an RMSNorm."""

    def __init__(self, spec: DecoderSpec, index: int, tables: RotaryTables) -> None:
        super().__init__()
        self.self_attn = DecoderAttention(spec.layers[index], spec.hidden_size, tables)
        self.mlp = DecoderMLP(spec.mlp_of(index), spec.hidden_size)
        self.block, self.residual_scale = spec.block, spec.residual_scale
        self.residual_of_norm = spec.residual_of_norm
        self.input_layernorm: Norm | None = None
        self.post_attention_layernorm: Norm | None = None
        self.attention_output_norm: Norm | None = None
        self.mlp_output_norm: Norm | None = None
        if spec.block != "output":
            self.input_layernorm = make_norm(spec.norm, spec.hidden_size)
            if spec.block != "parallel":
                self.post_attention_layernorm = make_norm(spec.norm, spec.hidden_size)
        if spec.block in ("output", "both"):
            self.attention_output_norm = make_norm(spec.norm, spec.hidden_size)
            self.mlp_output_norm = make_norm(spec.norm, spec.hidden_size)
        self.layer_input: LayerInput | None = None
        if spec.per_layer_input is not None:
            self.layer_input = LayerInput(spec.per_layer_input, spec.hidden_size, spec.norm)
        self.layer_scalar = nn.Parameter(torch.empty(1), requires_grad=False) if spec.layer_scale else None

    def forward(
        self,
        positions: Tensor,
        stream: Tensor,
        pending: Tensor | None,
        kv_cache: KVCache,
        attn: AttentionMetadata,
        rows: Tensor | None,
        given: Tensor | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """(residual stream, output not yet added), both [T, H], or [L, H] for the tokens in `rows`. `given`: the
        layer's own input, [T, P], where the model has one."""
        if self.block.startswith("parallel"):
            return self._parallel(positions, stream, pending, kv_cache, attn, rows)
        norms = (None, None) if self.block == "post" else (self.input_layernorm, self.post_attention_layernorm)
        stream, x, norm = enter(norms[0], stream, pending)
        if self.residual_of_norm:
            stream = x
        out = self.self_attn(positions, x, kv_cache, attn, rows, norm)
        if rows is not None:
            stream = stream.index_select(0, rows)
            given = None if given is None else given.index_select(0, rows)
        stream, out = self._leave(stream, out, self.attention_output_norm, self.input_layernorm)
        stream, x, norm = enter(norms[1], stream, out)
        if self.residual_of_norm:
            stream = x
        stream, out = self._leave(stream, self.mlp(x, norm), self.mlp_output_norm, self.post_attention_layernorm)
        if out is None or (given is None and self.layer_scalar is None):
            return stream, out
        return self._finish(stream + out, given), None

    def _finish(self, stream: Tensor, given: Tensor | None) -> Tensor:
        if self.layer_input is not None and given is not None:
            stream = stream + self.layer_input(stream, given)
        return stream if self.layer_scalar is None else stream * self.layer_scalar

    def _leave(
        self, stream: Tensor, out: Tensor, output_norm: Norm | None, norm: Norm | None
    ) -> tuple[Tensor, Tensor | None]:
        if output_norm is not None:
            out = output_norm(out)
        if self.residual_scale != 1.0:
            out = scaled(out, self.residual_scale)
        if self.block == "post":
            assert norm is not None
            return norm(added(stream, out)), None
        return stream, out

    def _parallel(
        self,
        positions: Tensor,
        stream: Tensor,
        pending: Tensor | None,
        kv_cache: KVCache,
        attn: AttentionMetadata,
        rows: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        if pending is not None:
            stream = added(stream, pending)
        assert self.input_layernorm is not None
        normed = self.input_layernorm(stream)
        attended = self.self_attn(positions, normed, kv_cache, attn, rows, None)
        if rows is not None:
            stream, normed = stream.index_select(0, rows), normed.index_select(0, rows)
        if self.post_attention_layernorm is not None:
            normed = self.post_attention_layernorm(stream)
        out = added(attended, self.mlp(normed, None))
        return stream, out if self.residual_scale == 1.0 else scaled(out, self.residual_scale)


def enter(norm: Norm | None, stream: Tensor, pending: Tensor | None) -> tuple[Tensor, Tensor, AddedNorm | None]:
    """(residual stream with `pending`, input of a product, norm that the product applies to it first). `pending` is
    added in place, with such a norm by the product."""
    if pending is not None:
        if isinstance(norm, RMSNorm) and norm.can_be_added:
            return stream, pending, norm.adding_to(stream)
        if isinstance(norm, LayerNorm):
            return stream, norm.add(pending, stream), None
        stream = added(stream, pending)
    return stream, stream if norm is None else norm(stream), None


class Decoder(nn.Module):
    """Embeddings, blocks, final norm."""

    layer_class: ClassVar[type[DecoderLayer]] = DecoderLayer

    def __init__(self, spec: DecoderSpec, max_model_len: int) -> None:
        super().__init__()
        hidden, width = spec.hidden_size, spec.embedding_size or spec.hidden_size
        self.embed_tokens = VocabParallelEmbedding(spec.vocab_size, width)
        self.embedding_scale, self.positions = spec.embedding_scale, spec.positions
        self.embed_positions: nn.Module | None = None
        if spec.positions is not None and spec.positions.kind == "learned":
            self.embed_positions = Embedding(spec.positions.num_rows, hidden)
        elif spec.positions is not None:
            self.embed_positions = SinusoidalPositions(spec.positions.num_rows, hidden)
        self.project_in: nn.Module | None = None
        self.project_out: nn.Module | None = None
        if width != hidden:
            self.project_in = ReplicatedLinear(width, hidden, False, "project_in")
            self.project_out = ReplicatedLinear(hidden, width, False, "project_out")
        self.embed_norm = None if spec.embedding_norm is None else make_norm(spec.embedding_norm, hidden)
        tables = RotaryTables(max_model_len)
        self.layers = nn.ModuleList(self.layer_class(spec, index, tables) for index in range(len(spec.layers)))
        self.layer_inputs: PerLayerInputs | None = None
        if spec.per_layer_input is not None:
            self.layer_inputs = PerLayerInputs(spec.per_layer_input, len(spec.layers), hidden, spec.norm)
        self.norm = None if spec.final_norm is None else make_norm(spec.final_norm, hidden)

    def _embed(self, ids: Tensor, positions: Tensor) -> Tensor:
        hidden = self.embed_tokens(ids)
        if self.embedding_scale != 1.0:
            hidden = scaled(hidden, _rounded(self.embedding_scale, hidden.dtype))
        if self.project_in is not None:
            hidden = self.project_in(hidden)
        if self.embed_positions is not None and self.positions is not None:
            hidden = added(hidden, self.embed_positions(positions, self.positions.offset))
        return hidden if self.embed_norm is None else self.embed_norm(hidden)

    def spread(self, hidden: Tensor) -> Tensor:
        """The residual stream, or several, that begins with the embeddings [T, H]."""
        return hidden

    def join(self, stream: Tensor) -> Tensor:
        """[L, H] of what the blocks make of it."""
        return stream

    def forward(
        self, ids: Tensor, positions: Tensor, kv_caches: list[KVCache], attn: AttentionMetadata, rows: Tensor | None
    ) -> Tensor:
        stream = self._embed(ids, positions)
        pending: Tensor | None = None
        last = len(self.layers) - 1
        given = [None] * len(self.layers) if self.layer_inputs is None else self.layer_inputs(ids, stream)
        stream = self.spread(stream)
        for index, layer in enumerate(self.layers):
            layer_rows = rows if index == last else None
            stream, pending = layer(positions, stream, pending, kv_caches[index], attn, layer_rows, given[index])
        stream, hidden, norm = enter(self.norm, self.join(stream), pending)
        if norm is not None:
            hidden = norm(hidden)
        return hidden if self.project_out is None else self.project_out(hidden)


@cache
def _rounded(scale: float, dtype: torch.dtype) -> float:
    """As a tensor of this dtype holds it; a number may be multiplied with while a graph is captured."""
    return float(torch.tensor(scale, dtype=dtype, device="cpu"))


class SinusoidalPositions(nn.Module):
    """Rows of sines, then cosines, of position / 10000 ** (i / (H / 2 - 1))."""

    def __init__(self, num_rows: int, hidden_size: int) -> None:
        super().__init__()
        half = hidden_size // 2
        with torch.device("cpu"):
            frequencies = torch.exp(torch.arange(half, dtype=torch.int64).float() * -(math.log(10000) / (half - 1)))
            angles = torch.arange(num_rows, dtype=torch.int64).float()[:, None] * frequencies[None]
            table = torch.cat((angles.sin(), angles.cos()), dim=1)
        self.table = table.to(device=torch.get_default_device(), dtype=torch.get_default_dtype())

    def forward(self, positions: Tensor, first: int) -> Tensor:
        """Position 0 is of row `first`."""
        return embedding(positions, self.table[first:])


class CausalLM(UpdatableModel):
    """A `model`, which gives hidden states, and its `lm_head`."""

    model: Any
    lm_head: ParallelLMHead

    def forward(
        self,
        input_ids: Tensor,
        positions: Tensor,
        kv_caches: list[KVCache],
        attn: AttentionMetadata,
        logits_rows: Tensor | None = None,
    ) -> Tensor:
        """Final hidden states of T tokens, [T, H]; their keys and values are written to the caches.

        Args:
            input_ids: int32 or int64 [T].
            positions: int64 [T].
            kv_caches: key and value cache of each layer.
            attn: the tokens' requests and blocks.
            logits_rows: int64 [L], increasing: tokens whose result is returned, [L, H]; the last block computes no
                others. None = all.
        """
        if logits_rows is not None and logits_rows.shape[0] == input_ids.shape[0]:
            logits_rows = None
        return self.model(input_ids, positions, kv_caches, attn, logits_rows)

    def compute_logits(self, hidden: Tensor) -> Tensor:
        """[L, H] -> this rank's logits, float32 [L, V_rank], those of `lm_head.vocab_range`."""
        return self.lm_head(hidden)

    def drop_head(self) -> str:
        """Do without the head, before weights are loaded; returns what its tensors' names begin with."""
        del self.lm_head
        return "lm_head."


class DecoderForCausalLM(CausalLM):
    """A dense decoder with its head. A family derives from it with its `describe` and the `names` of its checkpoints.
    `max_model_len` is the longest sequence; ValueError if it exceeds learned positions, or for an unknown option."""

    names: ClassVar[CheckpointNames] = CheckpointNames()
    decoder_class: ClassVar[type[Decoder]] = Decoder

    @classmethod
    def describe(cls, reader: ConfigReader) -> DecoderSpec:
        """The decoder that config.json means."""
        raise NotImplementedError

    @classmethod
    def spec_of(cls, config: HFConfig) -> DecoderSpec:
        """`describe`, for a config without unknown options. ValueError names one."""
        reader = ConfigReader(config)
        spec = cls.describe(reader)
        reader.check_all_read(cls.__name__)
        return spec

    @classmethod
    def resolve_config(cls, config: HFConfig) -> HFConfig:
        """`config` with the sizes of the decoder that it means. ValueError as `spec_of`."""
        spec = cls.spec_of(config)
        return replace(
            config,
            num_attention_heads=spec.layers[0].num_heads,
            num_key_value_heads=max(layer.num_kv_heads for layer in spec.layers),
            head_dim=max(layer.head_dim for layer in spec.layers),
            # What ranks that share each layer's MLP have to divide.
            intermediate_size=math.gcd(*(mlp.intermediate_size for mlp in (spec.mlp, *spec.mlps))),
            max_context_len=spec.max_positions,
            tie_word_embeddings=spec.tie_word_embeddings,
        )

    def __init__(self, config: HFConfig, max_model_len: int) -> None:
        super().__init__()
        self.spec = spec = self.spec_of(config)
        self._is_text_part = MARK in config.raw
        if spec.positions is not None and max_model_len > spec.max_positions:
            limit = f"max_position_embeddings={spec.max_positions}"
            raise ValueError(
                f"max_model_len must be at most the number of learned positions, {limit}; got {max_model_len}"
            )
        self.model = self.decoder_class(spec, max_model_len)
        width = spec.embedding_size or spec.hidden_size
        tied_to = self.model.embed_tokens if spec.tie_word_embeddings else None
        self.lm_head = ParallelLMHead(
            spec.vocab_size, width, tied_to, spec.head_bias, spec.logits_scale, spec.logits_softcap
        )

    def checkpoint_tensors(self, name: str, tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
        """Our names and tensors of a checkpoint's one: none for those of a whole model's other parts."""
        own = text_tensor_name(name) if self._is_text_part else name
        return iter(()) if own is None else self.names.read(own, tensor, self.spec)
