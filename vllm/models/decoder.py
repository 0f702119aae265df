"""The decoder: one block, composed as a DecoderSpec says."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache, partial
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from vllm.attention.backend import AttentionMetadata, KVCache
from vllm.config.checkpoint.config import HFConfig
from vllm.config.checkpoint.text_part import MARK, text_tensor_name
from vllm.distributed.stages import get_stage
from vllm.layers.absent import AbsentPart
from vllm.layers.attention import attention_layers
from vllm.layers.input_rows import AddedRows, InputRows
from vllm.layers.layernorm import LayerNorm, RMSNorm
from vllm.layers.linear import ReplicatedLinear
from vllm.layers.vocab_parallel_embedding import Embedding, ParallelLMHead, VocabParallelEmbedding
from vllm.layers.weight_update import UpdatableModel
from vllm.models.attention import DecoderAttention, RotaryTables
from vllm.models.checkpoint_names import CheckpointNames
from vllm.models.config_reader import ConfigReader
from vllm.models.head_mixture import HeadMixture
from vllm.models.latent_attention import DecoderLatentAttention
from vllm.models.moe import BranchedMixture, make_mlp
from vllm.models.norms import Norm, make_norm
from vllm.models.per_layer_inputs import LayerInput, PerLayerInputs
from vllm.models.prediction_layers import PredictionLayers
from vllm.models.spec import AnyMixer, BesideSpec, DecoderSpec, HeadMixtureSpec, LatentAttentionSpec, StateSpec
from vllm.models.states.beside import AttentionBeside
from vllm.models.states.make import make_state_layer
from vllm.ops.elementwise import added, scaled
from vllm.ops.embedding import embedding
from vllm.ops.recording import call_host
from vllm.ops.rms_norm import AddedNorm


def make_embedding(vocab_size: int, width: int, is_tied: bool) -> Any:
    """The embedding where a stage needs it: the last one, too, if the head is tied to it."""
    stage, make = get_stage(), partial(VocabParallelEmbedding, vocab_size, width)
    return make() if stage.embeds or (stage.is_last and is_tied) else AbsentPart(make)


def make_head(vocab_size: int, width: int, tied_to: Any, *options: Any) -> Any:
    """The last stage's head; elsewhere none, whatever it is tied to."""
    if get_stage().is_last:
        return ParallelLMHead(vocab_size, width, tied_to, *options)
    return AbsentPart(partial(ParallelLMHead, vocab_size, width, None, *options))


def make_layers(make: Callable[[int, bool], nn.Module], count: int) -> list[nn.Module]:
    """All layers of a model, those of other stages absent. `make`: makes a layer, by its number and whether it is this
    stage's."""
    own = get_stage().layers
    if own is None:
        return [make(index, True) for index in range(count)]
    return [make(index, True) if index in own else AbsentPart(partial(make, index, False)) for index in range(count)]


class DecoderLayer(nn.Module):
    """One block. What attention and MLP give is added to the residual stream by the next norm, which the product that
    follows applies: one operation for all three where the norm is an RMSNorm."""

    def __init__(self, spec: DecoderSpec, index: int, tables: RotaryTables) -> None:
        super().__init__()
        mixer, mlp = spec.layers[index], spec.mlps[index]
        self.self_attn = None if mixer is None else _make_mixer(mixer, spec, tables)
        self.mlp = None if mlp is None else make_mlp(mlp, spec.hidden_size)
        block = spec.block if spec.blocks is None else spec.blocks[index]
        assert block == "pre" or (mixer is not None and mlp is not None), "a layer without one of its parts"
        self.block, self.residual_scale = block, spec.residual_scale
        self.residual_of_norm = spec.residual_of_norm
        self.stream_scales = (1.0, 1.0) if spec.stream_scales is None else spec.stream_scales[index]
        self.input_layernorm: Norm | None = None
        self.post_attention_layernorm: Norm | None = None
        self.attention_output_norm: Norm | None = None
        self.mlp_output_norm: Norm | None = None
        if block != "output":
            if mixer is not None:
                self.input_layernorm = make_norm(spec.norm, spec.hidden_size)
            if block != "parallel" and mlp is not None:
                self.post_attention_layernorm = make_norm(spec.norm, spec.hidden_size)
        if block in ("output", "both"):
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
        if self.self_attn is None:
            if rows is not None:
                stream, pending = stream.index_select(0, rows), _selected(pending, rows)
        else:
            stream, x, norm = enter(norms[0], stream, pending)
            if self.residual_of_norm:
                stream, x, norm = self._of_norm(x, norm, self.stream_scales[0])
            pending = self.self_attn(positions, x, kv_cache, attn, rows, norm)
            if rows is not None:
                stream, given = stream.index_select(0, rows), _selected(given, rows)
            stream, pending = self._leave(stream, pending, self.attention_output_norm, self.input_layernorm)
        if self.mlp is None:
            return stream, pending
        if isinstance(self.mlp, BranchedMixture) and norms[1] is not None:
            stream = stream if pending is None else added(stream, pending)
            out = self.mlp(norms[1](stream), stream)
        else:
            stream, x, norm = enter(norms[1], stream, pending)
            if self.residual_of_norm:
                stream, x, norm = self._of_norm(x, norm, self.stream_scales[1])
            out = self.mlp(x, norm)
        stream, out = self._leave(stream, out, self.mlp_output_norm, self.post_attention_layernorm)
        if out is None or (given is None and self.layer_scalar is None):
            return stream, out
        return self._finish(stream + out, given), None

    def _finish(self, stream: Tensor, given: Tensor | None) -> Tensor:
        if self.layer_input is not None and given is not None:
            stream = stream + self.layer_input(stream, given)
        return stream if self.layer_scalar is None else stream * self.layer_scalar

    @staticmethod
    def _of_norm(x: Tensor, norm: AddedNorm | None, scale: float) -> tuple[Tensor, Tensor, None]:
        """`enter`'s result with the norm's, times `scale`, as the stream."""
        if norm is not None:
            x = norm(x)
        return x if scale == 1.0 else scaled(x, scale), x, None

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
        assert self.self_attn is not None and self.mlp is not None
        normed = self.input_layernorm(stream)
        attended = self.self_attn(positions, normed, kv_cache, attn, rows, None)
        if rows is not None:
            stream, normed = stream.index_select(0, rows), normed.index_select(0, rows)
        if self.post_attention_layernorm is not None:
            normed = self.post_attention_layernorm(stream)
        out = added(attended, self.mlp(normed, None))
        return stream, out if self.residual_scale == 1.0 else scaled(out, self.residual_scale)


def _make_mixer(mixer: AnyMixer, spec: DecoderSpec, tables: RotaryTables) -> nn.Module:
    if isinstance(mixer, StateSpec):
        return make_state_layer(mixer, spec.hidden_size)
    if isinstance(mixer, BesideSpec):
        return AttentionBeside(mixer, spec.hidden_size, tables)
    if isinstance(mixer, LatentAttentionSpec):
        return DecoderLatentAttention(mixer, spec.hidden_size, tables)
    if isinstance(mixer, HeadMixtureSpec):
        return HeadMixture(mixer, spec.hidden_size, tables)
    return DecoderAttention(mixer, spec.hidden_size, tables)


def _selected(values: Tensor | None, rows: Tensor) -> Tensor | None:
    return None if values is None else values.index_select(0, rows)


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
        self.stage = get_stage()
        self.embed_tokens = make_embedding(spec.vocab_size, width, spec.tie_word_embeddings)
        self.hidden_size = hidden
        self.embedding_scale, self.positions = spec.embedding_scale, spec.positions
        self.input_rows, self._scales_given = InputRows(), spec.scales_given
        self.added_rows = AddedRows()
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
        # Tables without memory are other tables.
        absent = RotaryTables(max_model_len)
        make = partial(self.layer_class, spec)
        layers = make_layers(lambda index, is_here: make(index, tables if is_here else absent), len(spec.layers))
        self.layers = nn.ModuleList(layers)
        self.own_layers = [index for index, layer in enumerate(self.layers) if not isinstance(layer, AbsentPart)]
        self._like = torch.empty(0)
        self.caches_of_layer = caches_of_layers(self.layers)
        self.layer_inputs: nn.Module | None = None
        if spec.per_layer_input is not None:
            self.layer_inputs = PerLayerInputs(spec.per_layer_input, len(spec.layers), hidden, spec.norm)
        self.norm = None if spec.final_norm is None else make_norm(spec.final_norm, hidden)
        # Layers before which the residual stream is kept, and those of the last step, [T, H] each; a stage sends those
        # that it has to the next.
        self.kept_streams: tuple[int, ...] = ()
        self.streams: list[Tensor] = []

    def embed(self, ids: Tensor, positions: Tensor) -> Tensor:
        """Embeddings [T, H] of tokens [T], as the first block takes them."""
        hidden = self.embed_tokens(ids)
        if self._scales_given:
            hidden = self.input_rows(hidden)
        if self.embedding_scale != 1.0:
            hidden = scaled(hidden, _rounded(self.embedding_scale, hidden.dtype))
        if not self._scales_given:
            hidden = self.input_rows(hidden)
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
        if self.stage.is_first:
            stream = self.embed(ids, positions)
        else:
            stream = self._received(ids.shape[0])
        before = [index for index in self.kept_streams if self.own_layers and index < self.own_layers[0]]
        kept = {index: self._received(ids.shape[0]) for index in before}
        pending: Tensor | None = None
        last = len(self.layers) - 1
        adds_at_end = last + 1 in self.added_rows
        given = [None] * len(self.layers) if self.layer_inputs is None else self.layer_inputs(ids, stream)
        stream = self.spread(stream)
        for index in self.own_layers:
            layer = self.layers[index]
            stream = self.added_rows.add_to(stream, index)
            if index in self.kept_streams:
                # Layers add to the stream in place.
                kept[index] = scaled(stream, 1.0) if pending is None else added(stream, pending)
            layer_rows = rows if index == last and not adds_at_end else None
            cache = self.caches_of_layer[index]
            kv_cache = () if cache is None else kv_caches[cache]
            stream, pending = layer(positions, stream, pending, kv_cache, attn, layer_rows, given[index])
        if not self.stage.is_last:
            stream = self.added_rows.add_to(stream, self.own_layers[-1] + 1)
            # As a norm adds it: the next stage's first layer computes what it would here.
            sent = (stream if pending is None else added(stream, pending)).contiguous()
            for each in (sent, *(kept[index] for index in self.kept_streams if index in kept)):
                call_host(partial(self.stage.send, each))
            return stream[:0]
        if adds_at_end:
            stream = self.added_rows.add_to(stream, last + 1)
            if rows is not None:
                stream, pending = stream.index_select(0, rows), _selected(pending, rows)
        if self.kept_streams:
            self.streams = [kept[index] for index in self.kept_streams]
        stream, hidden, norm = enter(self.norm, self.join(stream), pending)
        if norm is not None:
            hidden = norm(hidden)
        return hidden if self.project_out is None else self.project_out(hidden)

    def _received(self, num_tokens: int) -> Tensor:
        """A stream [T, H] of the stage before."""
        stream = self._like.new_empty(num_tokens, self.hidden_size)
        call_host(partial(self.stage.receive, stream))
        return stream


def caches_of_layers(layers: nn.ModuleList) -> list[int | None]:
    """The index of each layer among those that have keys and values; None: it has none."""
    count = itertools.count()
    return [next(count) if attention_layers(layer) else None for layer in layers]


@cache
def _rounded(scale: float, dtype: torch.dtype) -> float:
    """As a tensor of this dtype holds it; a number may be multiplied with while a graph is captured."""
    return float(torch.tensor(scale, dtype=dtype, device="cpu"))


def _head_sizes(spec: DecoderSpec) -> dict[str, Any]:
    """The sizes of attention in `HFConfig`; without attention there is nothing to split and no cache."""
    if not spec.cached:
        return {"num_attention_heads": 0, "num_key_value_heads": 0, "head_dim": 0}
    return {
        "num_attention_heads": spec.cached[0].num_heads,
        "num_key_value_heads": max(layer.num_kv_heads for layer in spec.cached),
        "head_dim": max(layer.head_dim for layer in spec.cached),
    }


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
    """A dense decoder with its head. A family derives from it with its `describe`, the `names` of its checkpoints and
    the `prediction` layers that these may have. `max_model_len` is the longest sequence; ValueError if it exceeds
    learned positions, or for an unknown option."""

    names: ClassVar[CheckpointNames] = CheckpointNames()
    prediction: ClassVar[PredictionLayers | None] = None
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
        reader.check_all_read(cls)
        return spec

    @classmethod
    def resolve_config(cls, config: HFConfig) -> HFConfig:
        """`config` with the sizes of the decoder that it means. ValueError as `spec_of`."""
        spec = cls.spec_of(config)
        return replace(
            config,
            **_head_sizes(spec),
            # Ranks that share each layer's MLP or state have to divide this.
            intermediate_size=math.gcd(
                *(mlp.split_size for mlp in spec.mlps if mlp is not None),
                *(layer.split_size for layer in spec.layers if isinstance(layer, StateSpec | BesideSpec)),
            ),
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
        self.lm_head = make_head(
            spec.vocab_size, width, tied_to, spec.head_bias, spec.logits_scale, spec.logits_softcap
        )

    @property
    def input_rows(self) -> InputRows | None:
        """The rows in place of embeddings; None where layers take more of a token than that."""
        return self.model.input_rows if self.spec.per_layer_input is None else None

    def checkpoint_tensors(self, name: str, tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
        """Our names and tensors of a checkpoint's one: none for those of a whole model's other parts."""
        own = text_tensor_name(name) if self._is_text_part else name
        return iter(()) if own is None else self.names.read(own, tensor, self.spec)
