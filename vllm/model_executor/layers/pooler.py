"""From the hidden states of a sequence to what a pooling request returns."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vllm.model_executor.model_loader.safetensors_file import iterate_tensors
from vllm.transformers_utils.sentence_transformers import DenseLayer, SentencePooling


class Pooler:
    """Embeddings in float32. ValueError: a layer after the pooling that is not supported."""

    def __init__(self, pooling: SentencePooling, device: torch.device) -> None:
        self.pooling = pooling
        self._dense = [_load_dense(layer).to(device) for layer in pooling.dense]

    def pool(self, hidden: Tensor) -> Tensor:
        """Hidden states [L, H] of a sequence -> its embedding [E], not normalised."""
        wide = hidden.float()
        vector = torch.cat([_pooled(wide, mode) for mode in self.pooling.modes])
        for dense in self._dense:
            vector = dense(vector)
        return vector

    def finish(self, vectors: Tensor, normalize: bool | None, dimensions: int | None) -> Tensor:
        """The first `dimensions` values of vectors [..., E], of length 1 if `normalize`, None = the model's default."""
        vectors = vectors[..., :dimensions]
        if normalize is None:
            normalize = self.pooling.normalize
        return F.normalize(vectors, dim=-1) if normalize else vectors


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


def _load_dense(layer: DenseLayer) -> nn.Module:
    activation = getattr(nn, layer.activation, None)
    if activation is None:
        raise ValueError(f"{layer.folder.name}/config.json: the activation {layer.activation} is not supported")
    linear = nn.Linear(layer.inputs, layer.outputs, layer.bias)
    stored, older = layer.folder / "model.safetensors", layer.folder / "pytorch_model.bin"
    if stored.is_file():
        weights = dict(iterate_tensors([stored]))
    elif older.is_file():
        weights = torch.load(older, map_location="cpu", weights_only=True)
    else:
        raise ValueError(f"{layer.folder.name} has neither {stored.name} nor {older.name}")
    linear.load_state_dict({name.removeprefix("linear."): values.float() for name, values in weights.items()})
    return nn.Sequential(linear, activation())
