"""From the hidden states of a sequence to what a pooling request returns."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vllm.config.checkpoint.sentence_transformers import PoolingLayer, SparsePooling, classifier_activation
from vllm.config.checkpoint.shards import shard_files
from vllm.config.checkpoint.weight_files import iterate_tensors
from vllm.layers.dummy_weights import dummy_weight
from vllm.pooling_params import PoolingParams, classified_length

if TYPE_CHECKING:
    from vllm.config import ModelConfig


TokenIds = Sequence[int] | np.ndarray
# Tokens whose logits of all words are held at once.
_WORD_ROWS = 64
_JOINED: dict[str, Callable[[Tensor, Tensor], Tensor]] = {"max": torch.maximum, "sum": torch.add}


class Pooler:
    """Pools the hidden states of a model, whose classifier is `classify`: [R, H] -> logits, float32 [R, labels].

    Raises:
        ValueError: a layer after the pooling that is not supported.
    """

    def __init__(
        self, config: ModelConfig, device: torch.device, classify: Callable[[Tensor], Tensor] | None = None
    ) -> None:
        self.config = config.pooler_config
        self.pooling = config.pooling
        self._layers = [_load_layer(layer).to(device) for layer in self.pooling.layers]
        self._classify = classify
        self._activation = _activation(config)
        self._heads: TokenHeads | None = None
        if self.pooling.has_token_heads:
            raw = config.hf_config.raw
            ends = raw.get("bos_token_id"), raw.get("eos_token_id")
            seed = config.seed if config.load_format == "dummy" else None
            self._heads = TokenHeads(Path(config.path), config.hf_config.hidden_size, *ends, seed).to(device)
            self._classify, self._activation = self._heads.weigh, "relu"
        # Decoders whose tokens see only those before them do not compute what follows in the first place.
        self._padding_id = config.class_padding_id if config.attn_type == "encoder_only" else None

    def __call__(self, hidden: Tensor, token_ids: TokenIds, params: PoolingParams) -> Tensor:
        """The float32 result of a request: [size], or of token tasks [tokens, size], with late chunking [chunks, size].

        Args:
            hidden: [L, H].
            token_ids: of the L tokens.
        """
        activate = self.config.use_activation if params.use_activation is None else params.use_activation
        if params.task == "classify":
            if self._padding_id is not None:
                hidden = hidden[: classified_length(token_ids, self._padding_id)]
            return self._activated(self._logits(self.pooled(hidden)[None]), activate)[0]
        if params.task == "token_classify":
            return self._classify_tokens(hidden, token_ids, params, activate)
        of_tokens = params.task == "token_embed" and params.late_chunking_params is None
        vectors = hidden.float() if params.task == "token_embed" else self.pooled(hidden)
        if self._heads is not None and of_tokens:
            inner = self._heads.without_ends(token_ids, keeps_last=True)
            vectors, token_ids = self._heads.embed(hidden[inner]), token_ids[inner]
        if params.late_chunking_params is not None:
            size = min(params.late_chunking_params.chunk_size, len(vectors))
            vectors = torch.stack([part.mean(0) for part in vectors.split(size)])
        if self.pooling.of_tokens == (params.task == "token_embed"):
            vectors = self._project(vectors)
        vectors = vectors[..., : params.dimensions or self.config.dimensions]
        normalize = self.pooling.normalize if activate is None else activate
        vectors = F.normalize(vectors, dim=-1) if normalize else vectors
        return vectors[_compared(token_ids, params.extra_kwargs)] if of_tokens and params.extra_kwargs else vectors

    def pooled(self, hidden: Tensor) -> Tensor:
        """Hidden states [L, H] -> float32 [H * modes], or of sparse embeddings a weight of each word."""
        if self.pooling.sparse is not None:
            return self._weights_of_words(hidden, self.pooling.sparse)
        wide = hidden.float()
        return torch.cat([_pooled(wide, mode) for mode in self.pooling.modes])

    def _weights_of_words(self, hidden: Tensor, sparse: SparsePooling) -> Tensor:
        """[L, H] -> float32 [V]; the logits of a few tokens at a time."""
        assert self._classify is not None, "the model has no head of words"
        weights: Tensor | None = None
        for rows in hidden.split(_WORD_ROWS):
            own = self._classify(rows).relu().log1p_()
            own = own.log1p_() if sparse.is_flat else own
            own = own.amax(0) if sparse.strategy == "max" else own.sum(0)
            weights = own if weights is None else _JOINED[sparse.strategy](weights, own)
        assert weights is not None
        return weights

    def _project(self, vectors: Tensor) -> Tensor:
        for layer in self._layers:
            vectors = layer(vectors)
        return vectors

    def _classify_tokens(
        self, hidden: Tensor, token_ids: TokenIds, params: PoolingParams, activate: bool | None
    ) -> Tensor:
        step = self.config.step_tag_id if params.step_tag_id is None else params.step_tag_id
        columns = params.returned_token_ids or self.config.returned_token_ids
        if self._heads is not None:
            inner = self._heads.without_ends(token_ids)
            hidden, token_ids = hidden[inner], token_ids[inner]
        if step is not None:
            hidden = hidden[torch.as_tensor(token_ids, device=hidden.device) == step]
        logits = self._logits(hidden)
        classes = self._activated(logits if not columns else logits[:, columns], activate)
        # A token's weight is one number.
        return classes if self._heads is None else classes.squeeze(-1)

    def _logits(self, rows: Tensor) -> Tensor:
        assert self._classify is not None, "the model has no classifier"
        logits = self._classify(rows)
        if self.config.logit_mean is not None:
            logits = logits - self.config.logit_mean
        return logits if self.config.logit_sigma is None else logits / self.config.logit_sigma

    def _activated(self, logits: Tensor, activate: bool | None) -> Tensor:
        name = self._activation
        if activate is False or (activate is None and name == "identity"):
            return logits
        if name in (None, "identity"):
            # One label has a probability of its own.
            name = "sigmoid" if logits.shape[-1] == 1 else "softmax"
        return logits.softmax(-1) if name == "softmax" else getattr(torch, str(name))(logits)


def _compared(token_ids: TokenIds, extra: Mapping[str, Any]) -> Tensor:
    """Which tokens' vectors late interaction keeps, bool [L]."""
    ids = np.asarray(token_ids)
    kept = extra.get("kept_token_ids")
    is_kept = np.ones(len(ids), dtype=bool) if kept is None else np.isin(ids, kept)
    return torch.from_numpy(is_kept & ~np.isin(ids, extra.get("skipped_token_ids") or ()))


def _activation(config: ModelConfig) -> str | None:
    """The activation of the classifier's logits; None: by their number. One reward is no probability."""
    raw = config.hf_config.raw
    named = classifier_activation(Path(config.path), raw)
    if named is None and config.convert == "reward" and "Process" not in config.architecture:
        return "identity"
    by_problem = {"multi_label_classification": "sigmoid", "regression": "identity"}
    return named or by_problem.get(str(raw.get("problem_type")))


def _pooled(hidden: Tensor, mode: str) -> Tensor:
    if mode == "cls":
        return hidden[0]
    if mode == "lasttoken":
        return hidden[-1]
    if mode == "max":
        return hidden.amax(0)
    if mode == "weightedmean":
        weights = torch.arange(1, len(hidden) + 1, dtype=torch.float32, device=hidden.device)
        return (hidden * weights[:, None]).sum(0) / weights.sum()
    total = hidden.sum(0)
    return total / len(hidden) ** (0.5 if mode == "mean_sqrt_len_tokens" else 1.0)


class _Normalize(nn.Module):
    def forward(self, vectors: Tensor) -> Tensor:
        return F.normalize(vectors, dim=-1)


class _LayerNorm(nn.Module):
    """LayerNorm over the weight's width."""

    def __init__(self, weights: Mapping[str, Tensor]) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(weights["norm.weight"].numel() if "norm.weight" in weights else 0)

    def forward(self, vectors: Tensor) -> Tensor:
        return self.norm(vectors)


class _Dense(nn.Module):
    """act(W x + b), and with a residual x, or its projection, beside it."""

    def __init__(self, layer: PoolingLayer, activation: nn.Module) -> None:
        super().__init__()
        assert layer.outputs is not None
        self.linear, self.activation = nn.Linear(layer.inputs, layer.outputs, layer.bias), activation
        self.is_residual = layer.is_residual
        projects = layer.is_residual and layer.inputs != layer.outputs
        self.residual = nn.Linear(layer.inputs, layer.outputs, bias=False) if projects else nn.Identity()

    def forward(self, vectors: Tensor) -> Tensor:
        changed = self.activation(self.linear(vectors))
        return changed + self.residual(vectors) if self.is_residual else changed


def _load_layer(layer: PoolingLayer) -> nn.Module:
    if layer.kind == "Normalize":
        return _Normalize()
    activation = _activation_module(layer)
    weights, file = _weights_of(layer)
    loaded: nn.Module = _Dense(layer, activation) if layer.kind == "Dense" else _LayerNorm(weights)
    wanted = {name: tuple(values.shape) for name, values in loaded.state_dict().items()}
    found = {name: tuple(values.shape) for name, values in weights.items()}
    if wanted != found:
        raise ValueError(f"{layer.folder.name}/{file} has weights {found}, but a {layer.kind} has {wanted} here")
    loaded.load_state_dict(weights)
    return loaded


def _weights_of(layer: PoolingLayer) -> tuple[dict[str, Tensor], str]:
    """Its weights in float32, by their names in it, and where they are in its folder. ValueError: there are none."""
    if layer.prefix:
        named = iterate_tensors(shard_files(layer.folder))
        own = {name: values for name, values in named if name.startswith(layer.prefix)}
        weights = {f"linear.{name.removeprefix(layer.prefix)}": values.float() for name, values in own.items()}
        return weights, f"{layer.prefix}*"
    stored, older = layer.folder / "model.safetensors", layer.folder / "pytorch_model.bin"
    file = next((each for each in (stored, older) if each.is_file()), None)
    if file is None:
        raise ValueError(f"{layer.folder.name} has neither {stored.name} nor {older.name}")
    return {name: values.float() for name, values in iterate_tensors([file])}, file.name


def _activation_module(layer: PoolingLayer) -> nn.Module:
    """ValueError: it is none of torch's, or needs more than its name."""
    found = getattr(nn, layer.activation, None)
    try:
        made = found() if isinstance(found, type) else None
    except TypeError:
        made = None
    if not isinstance(made, nn.Module) or next(made.parameters(), None) is not None:
        raise ValueError(f"{layer.folder.name}/config.json: the activation {layer.activation} is not supported")
    return made


class TokenHeads(nn.Module):
    """The layers of sparse_linear.pt and colbert_linear.pt, in float32.

    Args:
        first, last: ids of the tokens that begin and end a text; None: there is none.
        seed: of layers that are made up; None: they are read.

    Raises:
        ValueError: a file is missing, or not of such a layer.
    """

    def __init__(
        self, folder: Path, hidden_size: int, first: int | None, last: int | None, seed: int | None = None
    ) -> None:
        super().__init__()
        if seed is None:
            self.sparse_linear = _linear(folder / "sparse_linear.pt", hidden_size, 1)
            self.colbert_linear = _linear(folder / "colbert_linear.pt", hidden_size)
        else:
            self.sparse_linear = nn.Linear(hidden_size, 1)
            self.colbert_linear = nn.Linear(hidden_size, hidden_size)
            for name, values in self.named_parameters():
                values.requires_grad_(False).copy_(dummy_weight(name, values.shape, values.dtype, values.device, seed))
        self._first, self._last = first, last

    def weigh(self, rows: Tensor) -> Tensor:
        """[R, H] -> [R, 1]."""
        return self.sparse_linear(rows.float())

    def embed(self, rows: Tensor) -> Tensor:
        """[R, H] -> [R, D]."""
        return self.colbert_linear(rows.float())

    def without_ends(self, token_ids: Sequence[int] | np.ndarray, keeps_last: bool = False) -> slice:
        """The tokens of a text between its first one and its last one."""
        ends = len(token_ids) > 0 and token_ids[-1] == self._last and not keeps_last
        begins = len(token_ids) > 0 and token_ids[0] == self._first
        return slice(int(begins), len(token_ids) - int(ends))


def _linear(path: Path, inputs: int, outputs: int | None = None) -> nn.Linear:
    if not path.is_file():
        raise ValueError(f"{path.parent.name} lacks {path.name}, a layer of BgeM3EmbeddingModel")
    tensors = {name: values.float() for name, values in iterate_tensors([path])}
    found = {name: tuple(values.shape) for name, values in tensors.items()}
    width = outputs or (found.get("weight") or (0,))[0]
    wanted = {"weight": (width, inputs), "bias": (width,)}
    if found != wanted:
        raise ValueError(f"{path.parent.name}/{path.name} has weights {found}, expected {wanted}")
    linear = nn.Linear(inputs, width)
    linear.load_state_dict(tensors)
    return linear.requires_grad_(False)
