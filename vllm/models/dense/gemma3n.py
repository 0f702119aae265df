"""Gemma 3n (huggingface.co/google/gemma-3n-E4B), the text decoder. Several residual streams, of which a block computes
one and predicts the others (AltUp, arXiv:2301.13310), a residual of low rank (LAuReL, arXiv:2411.07501), sparse MLPs,
layers that read earlier ones' keys, and inputs of the layers' own."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields, replace
from typing import ClassVar

import torch
from torch import Tensor, nn

from vllm.attention.backend import AttentionMetadata, KVCache
from vllm.layers.activation import get_act_fn
from vllm.layers.linear import ReplicatedLinear
from vllm.models.attention import RotaryTables
from vllm.models.config_reader import ConfigReader
from vllm.models.decoder import Decoder, DecoderForCausalLM, DecoderLayer
from vllm.models.dense.gemma import describe
from vllm.models.dense.gemma_shared import NAMES, kv_sources, per_layer_input
from vllm.models.norms import make_norm
from vllm.models.spec import DecoderSpec, MlpSpec


@dataclass(frozen=True)
class Gemma3nSpec(DecoderSpec):
    """A DecoderSpec with `num_streams` residual streams, of which blocks compute the `active` one. `scales_active`:
    what gates a layer's input is multiplied by weights. `laurel_rank`: of the residual of low rank."""

    num_streams: int = 4
    active: int = 0
    scales_active: bool = True
    laurel_rank: int = 64


class _AltUp(nn.Module):
    """From the streams, [S, T, H], the block's input and their prediction; from its output their correction."""

    def __init__(self, spec: Gemma3nSpec) -> None:
        super().__init__()
        streams = spec.num_streams
        self.active, self.scales_active = spec.active, spec.scales_active
        self.correct_output_scale = nn.Parameter(torch.empty(spec.hidden_size), requires_grad=False)
        self.correction = ReplicatedLinear(streams, streams, False, "correction_coefs")
        self.prediction = ReplicatedLinear(streams, streams * streams, False, "prediction_coefs")
        self.router = ReplicatedLinear(spec.hidden_size, streams, False, "modality_router")
        self.router_norm = make_norm(spec.norm, spec.hidden_size)
        self._scale, self._tanh = 1.0 / spec.hidden_size, get_act_fn("tanh")

    def _weights(self, x: Tensor) -> Tensor:
        """[T, H] -> [T, S]."""
        return self._tanh(self.router(self.router_norm(x) * self._scale).float()).to(x.dtype)

    def predict(self, streams: Tensor) -> Tensor:
        """[S, T, H] -> the same shape: each stream plus a mixture of all."""
        count = len(streams)
        mixture = self.prediction(self._weights(streams[self.active])).view(-1, count, count)
        predicted = streams.clone()
        # Not as a matrix product, whose sums may depend on the number of tokens.
        for source in range(count):
            predicted += mixture[:, :, source].t()[..., None] * streams[source]
        return predicted

    def correct(self, predicted: Tensor, computed: Tensor) -> Tensor:
        """[S, T, H], and the block's output [T, H] -> [S, T, H]."""
        shares = self.correction(self._weights(computed)) + 1.0
        return predicted + shares.t()[..., None] * (computed - predicted[self.active])

    def gating(self, streams: Tensor) -> Tensor:
        """The stream that gates a layer's input: [T, H]."""
        active = streams[self.active]
        return active * self.correct_output_scale if self.scales_active else active


class _Laurel(nn.Module):
    """x + norm(B A x)."""

    def __init__(self, spec: Gemma3nSpec) -> None:
        super().__init__()
        self.left = ReplicatedLinear(spec.hidden_size, spec.laurel_rank, False, "linear_left")
        self.right = ReplicatedLinear(spec.laurel_rank, spec.hidden_size, False, "linear_right")
        self.post_laurel_norm = make_norm(spec.norm, spec.hidden_size)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.post_laurel_norm(self.right(self.left(x)))


class Gemma3nLayer(DecoderLayer):
    """A block over several streams, [S, T, H]."""

    def __init__(self, spec: DecoderSpec, index: int, tables: RotaryTables) -> None:
        super().__init__(spec, index, tables)
        assert isinstance(spec, Gemma3nSpec)
        self.altup, self.laurel = _AltUp(spec), _Laurel(spec)

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
        """See DecoderLayer.forward; `stream` and the result have S streams, and nothing is pending."""
        norms = self.input_layernorm, self.attention_output_norm, self.post_attention_layernorm, self.mlp_output_norm
        before, after, before_mlp, after_mlp = norms
        assert before and after and before_mlp and after_mlp and self.layer_input and given is not None
        assert self.self_attn is not None and self.mlp is not None
        predicted = self.altup.predict(stream)
        normed = before(predicted[self.altup.active])
        attended = self.self_attn(positions, normed, kv_cache, attn, rows, None)
        if rows is not None:
            predicted, normed = predicted.index_select(1, rows), normed.index_select(0, rows)
            given = given.index_select(0, rows)
        x = (predicted[self.altup.active] + after(attended) + self.laurel(normed)) * math.sqrt(0.5)
        x = x + after_mlp(self.mlp(before_mlp(x), None))
        streams = self.altup.correct(predicted, x)
        streams[1:] += self.layer_input(self.altup.gating(streams), given)
        return streams, None


class Gemma3nDecoder(Decoder):
    """Its first stream is the embedding, the others projections of it; their mean is the result."""

    layer_class = Gemma3nLayer

    def __init__(self, spec: DecoderSpec, max_model_len: int) -> None:
        super().__init__(spec, max_model_len)
        assert isinstance(spec, Gemma3nSpec)
        size, others = spec.hidden_size, range(spec.num_streams - 1)
        self.altup_projections = nn.ModuleList(ReplicatedLinear(size, size, False, str(i)) for i in others)
        self.altup_unembed_projections = nn.ModuleList(ReplicatedLinear(size, size, False, str(i)) for i in others)

    def spread(self, hidden: Tensor) -> Tensor:
        """[T, H] -> [S, T, H]."""
        others = [_as_large_as(hidden, projection(hidden)) for projection in self.altup_projections]
        return torch.stack([hidden, *others])

    def join(self, streams: Tensor) -> Tensor:
        """[S, T, H] -> [T, H]."""
        first, *rest = streams
        pairs = zip(self.altup_unembed_projections, rest, strict=True)
        return torch.stack([first, *(_as_large_as(first, projection(x)) for projection, x in pairs)]).mean(0)


def _as_large_as(one: Tensor, x: Tensor) -> Tensor:
    """x with the root mean square of each row of `one`."""
    size, own = (each.square().mean(-1, keepdim=True) for each in (one, x))
    return x * size.sqrt() / own.clamp(min=1e-5).sqrt()


class Gemma3nForCausalLM(DecoderForCausalLM):
    names = NAMES
    decoder_class: ClassVar[type[Decoder]] = Gemma3nDecoder

    @classmethod
    def describe(cls, reader: ConfigReader) -> DecoderSpec:
        reader.ignore("altup_coef_clip")  # in training
        reader.ignore("query_pre_attn_scalar")  # scores are not scaled
        norm, kinds = reader.norm(), reader.every_nth_full(5)
        base = reader.attention(
            rotary=False,
            head_dim=reader.integer("head_dim", default=256),
            scale=1.0,
            qk_norm=norm,
            v_norm=replace(norm, weight=False),
        )
        layers = reader.by_kind(base, kinds, default_window=512, theta=1e6, sliding_theta=10000.0)
        sources = kv_sources(reader, reader.layer_kinds(kinds), 15)
        layers = tuple(replace(layer, kv_source=source) for layer, source in zip(layers, sources, strict=True))
        mlps = cls.mlps(reader)
        spec = describe(reader, "both", layers, 30.0, mlps, norm)
        given = per_layer_input(reader, 256, mlps[0].activation)
        if given is None:
            raise reader.refuse("hidden_size_per_layer_input", "every layer has an input of its own")
        num_streams = reader.integer("altup_num_inputs", default=4)
        active = reader.count("altup_active_idx", default=0)
        if active >= num_streams:
            raise reader.refuse("altup_active_idx", f"there are {num_streams} streams")
        return Gemma3nSpec(
            **{field.name: getattr(spec, field.name) for field in fields(spec)} | {"per_layer_input": given},
            num_streams=num_streams,
            active=active,
            scales_active=reader.boolean("altup_correct_scale", default=True),
            laurel_rank=reader.integer("laurel_rank", default=64),
        )

    @classmethod
    def mlps(cls, reader: ConfigReader) -> tuple[MlpSpec, ...]:
        """The MLP of each layer: widths and sparsities may be given for each."""
        count = reader.num_layers
        default = [0.95] * 10 + [0.0] * (count - 10) if count > 10 else [0.0] * count
        sparsities = reader.get("activation_sparsity_pattern", default=default)
        if (
            not isinstance(sparsities, list)
            or len(sparsities) != count
            or not all(0 <= each < 1 for each in sparsities)
        ):
            raise reader.refuse("activation_sparsity_pattern", f"it must have {count} numbers from 0 to below 1")
        sizes = reader.get("intermediate_size", default=16384)
        sizes = sizes if isinstance(sizes, list) else [sizes] * count
        if len(sizes) != count or not all(type(size) is int and size > 0 for size in sizes):
            raise reader.refuse("intermediate_size", f"it must be a positive integer, or {count} of them")
        mlp = reader.mlp("gelu_pytorch_tanh", bias=False, activation_names=("hidden_activation",), sizes=sizes)
        return tuple(
            replace(mlp, intermediate_size=size, sparsity=float(sparsity))
            for size, sparsity in zip(sizes, sparsities, strict=True)
        )
