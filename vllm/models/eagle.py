"""EAGLE heads (arXiv:2401.15077, arXiv:2503.01840): a Llama layer, trained for one model, that takes its hidden states.

EAGLE takes the final ones: fc([embedding; hidden]) is the layer's input, which has no norm before attention, and its
result goes to the model's head as it is. EAGLE-3 takes the streams before three of the model's layers, through its fc;
attention's input is the normalised embedding beside the normalised hidden state, to which attention's result is added,
and the head is the layer's own, of fewer tokens.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from vllm.attention.backend import AttentionMetadata, KVCache
from vllm.config.checkpoint.config import HFConfig
from vllm.layers.linear import ReplicatedLinear
from vllm.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding
from vllm.layers.weight_update import UpdatableModel
from vllm.models.attention import DecoderAttention, RotaryTables
from vllm.models.decoder import DecoderLayer, enter
from vllm.models.dense.llama import LlamaForCausalLM
from vllm.models.mlp import MLP
from vllm.models.norms import make_norm
from vllm.models.spec import AttentionSpec, DecoderSpec, MlpSpec
from vllm.ops.elementwise import added


def stream_layers(folder: Path, num_layers: int) -> tuple[int, ...]:
    """The target's layers whose input EAGLE-3 takes, by the head's config.json."""
    raw = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    own = raw.get("eagle_aux_hidden_state_layer_ids") or (raw.get("eagle_config") or {}).get(
        "eagle_aux_hidden_state_layer_ids"
    )
    chosen = tuple(own or (2, num_layers // 2, num_layers - 3))
    if not all(isinstance(index, int) and 0 <= index < num_layers for index in chosen):
        raise ValueError(
            f"speculative_config: {folder.name}: eagle_aux_hidden_state_layer_ids={chosen} are not layers of the "
            f"target's {num_layers}"
        )
    return chosen


class EagleHead(UpdatableModel):
    """As Predictor, of one layer. `takes_streams`: of the target's layers, in place of final hidden states."""

    num_layers = 1
    is_of_target = False

    def __init__(
        self, folder: Path, takes_streams: bool, names: set[str], config: HFConfig, max_model_len: int
    ) -> None:
        """`names`: of the checkpoint's tensors. ValueError: it has more layers than one, or is no such head."""
        super().__init__()
        raw = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        self.takes_streams, self.can_be_recorded = takes_streams, not takes_streams
        self.spec = spec = LlamaForCausalLM.spec_of(config)
        where = f"speculative_config: {folder.name}"
        if len(spec.layers) != 1 or raw.get("norm_before_residual"):
            raise ValueError(f"{where}: heads of one layer, without norm_before_residual, are read")
        if ("midlayer.input_layernorm.weight" in {_plain(name) for name in names}) is not takes_streams:
            raise ValueError(f"{where} is no head of {'EAGLE-3' if takes_streams else 'EAGLE'}: take the other method")
        size = spec.hidden_size
        tables = RotaryTables(max_model_len)
        self.model: Any = nn.Module()
        has_bias = any(_plain(name) == "fc.bias" for name in names)
        num_inputs = (3 if takes_streams else 2) * size
        self.model.fc = ReplicatedLinear(num_inputs, size, has_bias, "fc")
        # EAGLE's are the model's.
        self._owns_embeddings = takes_streams and any(_plain(name) == "embed_tokens.weight" for name in names)
        if self._owns_embeddings:
            self.model.embed_tokens = VocabParallelEmbedding(spec.vocab_size, size)
        self.vocab_size = spec.vocab_size
        if not takes_streams:
            layer = DecoderLayer(spec, 0, tables)
            layer.input_layernorm = None
            self.model.layers = nn.ModuleList([layer])
            return
        self.vocab_size = raw.get("draft_vocab_size") or spec.vocab_size
        self.model.layers = nn.ModuleList([_MidLayer(spec, tables)])
        self.model.norm = make_norm(spec.norm, size)
        self.lm_head = ParallelLMHead(self.vocab_size, size)
        self.model.ids = nn.Identity()
        if any(_plain(name) == "d2t" for name in names):
            self.model.ids = _Ids(self.vocab_size)

    def taken_of(self, hidden: Tensor, streams: Sequence[Tensor]) -> Tensor:
        """[T, H] of the target's final hidden states, or of its streams, [T, H] each."""
        return self.model.fc(torch.cat(tuple(streams), dim=-1)) if self.takes_streams else hidden

    def embed(self, target: Any, ids: Tensor, positions: Tensor) -> Tensor:
        """Embeddings [T, H] of tokens [T]."""
        embeddings: Tensor
        embeddings = self.model.embed_tokens(ids) if self._owns_embeddings else target.model.embed(ids, positions)
        return embeddings

    def combine(self, index: int, embeddings: Tensor, hidden: Tensor) -> Any:
        """The layer's input."""
        if self.takes_streams:
            return self.model.layers[0].combine(embeddings, hidden)
        return self.model.fc(torch.cat((embeddings, hidden), dim=-1))

    def forward(
        self,
        index: int,
        stream: Any,
        positions: Tensor,
        kv_cache: KVCache,
        attn: AttentionMetadata,
        rows: Tensor | None = None,
    ) -> Tensor:
        """Hidden states for the layer's next application, [T, H], or [L, H] of the tokens in `rows`."""
        own: Tensor
        own, pending = self.model.layers[0](positions, stream, None, kv_cache, attn, rows)
        return own if pending is None else added(own, pending)

    def compute_logits(self, target: Any, index: int, hidden: Tensor) -> Tensor:
        """float32 [L, V_rank], from `forward`'s results [L, H]."""
        logits: Tensor
        logits = self.lm_head(self.model.norm(hidden)) if self.takes_streams else target.compute_logits(hidden)
        return logits

    def target_ids(self, ids: Tensor) -> Tensor:
        """The target's ids of those that `compute_logits` has."""
        if not self.takes_streams or not isinstance(self.model.ids, _Ids):
            return ids
        chosen = ids.long()
        return (chosen + self.model.ids.d2t[chosen]).int()

    def checkpoint_tensors(self, name: str, tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
        """Our names and tensors of a checkpoint's one; none for the model's embeddings and head."""
        own = _plain(name)
        part = own.partition(".")[0]
        if part == "t2d" or (part == "embed_tokens" and not self._owns_embeddings):
            return
        if part == "lm_head":
            if self.takes_streams:
                yield own, tensor
        elif part == "d2t":
            yield "model.ids.d2t", tensor
        else:
            yield "model." + own.replace("midlayer.", "layers.0."), tensor


def _plain(name: str) -> str:
    return name.removeprefix("model.")


class _Ids(nn.Module):
    """The difference between a head's token id and the target's."""

    def __init__(self, vocab_size: int) -> None:
        super().__init__()
        self.d2t = nn.Parameter(torch.zeros(vocab_size, dtype=torch.int64), requires_grad=False)


class _MidLayer(nn.Module):
    """EAGLE-3's."""

    def __init__(self, spec: DecoderSpec, tables: RotaryTables) -> None:
        super().__init__()
        (mixer,), (mlp,), size = spec.layers, spec.mlps, spec.hidden_size
        assert isinstance(mixer, AttentionSpec) and isinstance(mlp, MlpSpec)
        self.input_layernorm, self.hidden_norm = make_norm(spec.norm, size), make_norm(spec.norm, size)
        self.self_attn = DecoderAttention(mixer, size, tables, 2 * size)
        self.post_attention_layernorm = make_norm(spec.norm, size)
        self.mlp = MLP(mlp, size)

    def combine(self, embeddings: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """Attention's input, [T, 2 H], and what its result is added to."""
        # Which is added to in place, while the caller's may be kept.
        return torch.cat((self.input_layernorm(embeddings), self.hidden_norm(hidden)), dim=-1), hidden.clone()

    def forward(
        self,
        positions: Tensor,
        stream: tuple[Tensor, Tensor],
        pending: None,
        kv_cache: KVCache,
        attn: AttentionMetadata,
        rows: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        """As DecoderLayer."""
        x, residual = stream
        attended = self.self_attn(positions, x, kv_cache, attn, rows, None)
        if rows is not None:
            residual = residual.index_select(0, rows)
        residual, x, norm = enter(self.post_attention_layernorm, residual, attended)
        return residual, self.mlp(x, norm)
