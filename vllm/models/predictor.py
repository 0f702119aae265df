"""A checkpoint's layers that predict the tokens after the next one, apart from the model that they belong to."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from vllm.attention.backend import AttentionMetadata, KVCache
from vllm.config.checkpoint.config import HFConfig
from vllm.layers.linear import ReplicatedLinear
from vllm.layers.weight_update import UpdatableModel
from vllm.models.attention import RotaryTables
from vllm.models.decoder import DecoderForCausalLM, DecoderLayer, enter
from vllm.models.norms import make_norm
from vllm.models.prediction_layers import PredictionLayers
from vllm.models.spec import AnyMixer, AttentionSpec, DecoderSpec, LatentAttentionSpec, MlpSpec
from vllm.ops.elementwise import added


class Combiner(nn.Module):
    """[T, H] of embeddings and hidden states, [T, H] each."""

    def __init__(self, layers: PredictionLayers, spec: DecoderSpec) -> None:
        super().__init__()
        self._hidden_first = layers.hidden_first
        self.embedding_norm = make_norm(spec.norm, spec.hidden_size)
        self.hidden_norm = make_norm(spec.norm, spec.hidden_size)
        self.projection = ReplicatedLinear(2 * spec.hidden_size, spec.hidden_size, False, "projection")

    def forward(self, embeddings: Tensor, hidden: Tensor) -> Tensor:
        parts = self.embedding_norm(embeddings), self.hidden_norm(hidden)
        return self.projection(torch.cat(parts[::-1] if self._hidden_first else parts, dim=-1))


class Predictor(UpdatableModel):
    """The first `num_layers` of a checkpoint's prediction layers. Embeddings and head are those of the model, `target`.
    Of layer i, T tokens:

        hidden = predictor.taken_of(hidden, ())  # of the target
        stream = predictor.combine(i, predictor.embed(target, ids, positions), hidden)  # [T, H] each
        hidden = predictor(i, stream, positions, kv_cache, attn)  # for layer i + 1, or for this one again
        logits = predictor.compute_logits(target, i, hidden)
    """

    can_be_recorded = True
    is_of_target = True
    """Whether the weights are of the target's checkpoint."""

    def __init__(
        self, model_class: type[DecoderForCausalLM], num_layers: int, config: HFConfig, max_model_len: int
    ) -> None:
        super().__init__()
        assert model_class.prediction is not None
        self._layers, self._names = model_class.prediction, model_class.names
        whole = model_class.spec_of(config)
        self._num_model_layers, self.num_layers = len(whole.layers), num_layers
        self.spec = spec = _spec(whole, self._layers, num_layers)
        tables = RotaryTables(max_model_len)
        # Names of tensors begin with those of the modules.
        self.model: Any = nn.Module()
        self.model.layers = nn.ModuleList(DecoderLayer(spec, index, tables) for index in range(num_layers))
        num_own = 1 if self._layers.share_parts else num_layers
        self.model.combiners = nn.ModuleList(Combiner(self._layers, spec) for _ in range(num_own))
        norm = spec.final_norm if self._layers.output_norm is not None else None
        count = 0 if norm is None else num_own
        self.model.norms = nn.ModuleList(make_norm(norm or spec.norm, spec.hidden_size) for _ in range(count))

    def combine(self, index: int, embeddings: Tensor, hidden: Tensor) -> Tensor:
        """The input of layer `index`, [T, H], from the embeddings of the tokens that it is given, and from the hidden
        states before them, both [T, H]."""
        return self._own(self.model.combiners, index)(embeddings, hidden)

    def forward(
        self,
        index: int,
        stream: Tensor,
        positions: Tensor,
        kv_cache: KVCache,
        attn: AttentionMetadata,
        rows: Tensor | None = None,
    ) -> Tensor:
        """Run layer `index` on its input [T, H], which is overwritten: hidden states for a further layer,
        [T, H], or [L, H] of the tokens in `rows`, int64 [L]."""
        stream, pending = self.model.layers[index](positions, stream, None, kv_cache, attn, rows)
        if not self._layers.passes_normed or not len(self.model.norms):
            return stream if pending is None else added(stream, pending)
        _, hidden, norm = enter(self._own(self.model.norms, index), stream, pending)
        return hidden if norm is None else norm(hidden)

    @property
    def vocab_size(self) -> int:
        """The width of the logits."""
        return self.spec.vocab_size

    def taken_of(self, hidden: Tensor, streams: Sequence[Tensor]) -> Tensor:
        """The part of the target's final hidden states [T, H] that the first layer takes."""
        return hidden

    def embed(self, target: Any, ids: Tensor, positions: Tensor) -> Tensor:
        """Embeddings [T, H] of tokens [T]."""
        embeddings: Tensor = target.model.embed(ids, positions)
        return embeddings

    def compute_logits(self, target: Any, index: int, hidden: Tensor) -> Tensor:
        """float32 [L, V_rank], from layer `index`'s results [L, H]."""
        if not self._layers.passes_normed and len(self.model.norms):
            hidden = self._own(self.model.norms, index)(hidden)
        logits: Tensor = target.compute_logits(hidden)
        return logits

    def target_ids(self, ids: Tensor) -> Tensor:
        """The target's ids of those that `compute_logits` has."""
        return ids

    @staticmethod
    def _own(modules: Any, index: int) -> Any:
        """A layer's module, or the one that all have."""
        return modules[min(index, len(modules) - 1)]

    def checkpoint_tensors(self, name: str, tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
        """Our names and tensors of a checkpoint's one; none for the model's and those of later layers."""
        place = self._layers.place(name, self._num_model_layers)
        if place is None or place[1] >= self.num_layers:
            return
        part, index, rest = place
        if part == "layers":
            yield from self._names.read(f"model.layers.{index}.{rest}", tensor, self.spec)
        else:
            yield f"model.{part}.{index}.{rest}", tensor


def _spec(whole: DecoderSpec, layers: PredictionLayers, count: int) -> DecoderSpec:
    """A decoder of `count` layers like the model's last one of the kind."""
    mixers = [mixer for mixer in whole.layers if _has_window(mixer) is layers.have_windows]
    mlps = [mlp for mlp in whole.mlps if mlp is not None and (isinstance(mlp, MlpSpec) or not layers.is_dense)]
    if not mixers or not mlps:
        raise ValueError("speculative_config: method='mtp': the model has no layer of its prediction layers' kind")
    return replace(whole, layers=(mixers[-1],) * count, mlps=(mlps[-1],) * count, blocks=None, stream_scales=None)


def _has_window(mixer: AnyMixer | None) -> bool | None:
    """None: it is no attention."""
    if isinstance(mixer, LatentAttentionSpec):
        return False
    return mixer.window is not None if isinstance(mixer, AttentionSpec) else None
