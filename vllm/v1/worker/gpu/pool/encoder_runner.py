"""Runs a model whose tokens see those after them, for whole requests side by side, and pools what it gives."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from vllm.attention.packed import PackedAttention, PackedSequences
from vllm.config import VllmConfig
from vllm.model_executor.layers.attention import attention_layers, use_backend
from vllm.model_executor.layers.pooler import Pooler
from vllm.model_executor.model_loader import get_model
from vllm.model_executor.models.transformers_encoder import TransformersEncoder
from vllm.transformers_utils.sentence_transformers import warn_of_unread
from vllm.v1.messages import EngineCoreRequest


def whole_sequences(model: Any) -> Callable[[Tensor, Tensor, Tensor, Sequence[int]], Sequence[Tensor]]:
    """A model's hidden states [L, H] of each of the sequences that follow one another; arguments as those of
    EncoderForPooling.forward."""
    layers = attention_layers(model)
    if isinstance(model, TransformersEncoder):
        return model
    if not layers:
        return lambda ids, positions, types, lengths: model(ids, positions, types, lengths).split(lengths)
    use_backend(model, PackedAttention())

    def forward(ids: Tensor, positions: Tensor, types: Tensor, lengths: Sequence[int]) -> Sequence[Tensor]:
        return model(ids, positions, [None] * len(layers), PackedSequences(lengths), None).split(lengths)

    return forward


class EncoderRunner:
    """An encoder, or a decoder without its causal mask, with its pooler on one device."""

    def __init__(self, config: VllmConfig, use_tqdm: bool = False) -> None:
        model_config = config.model_config
        self.device = torch.device(config.device_config.device)
        self.model: Any = get_model(model_config, self.device, use_tqdm)
        warn_of_unread(Path(model_config.path))
        self._forward = whole_sequences(self.model)
        self._pooler = Pooler(model_config, self.device, getattr(self.model, "classify", None))

    @torch.inference_mode()
    def run(self, requests: Sequence[EngineCoreRequest]) -> list[Tensor]:
        """The float32 result of each request, on the CPU. The fewest attention calls are made for sorted lengths."""
        lengths = [len(request.prompt_token_ids) for request in requests]
        ids = torch.tensor([each for request in requests for each in request.prompt_token_ids])
        positions = torch.cat([torch.arange(length) for length in lengths])
        types = torch.cat([_types(request, length) for request, length in zip(requests, lengths, strict=True)])
        ids, positions, types = (tensor.to(self.device) for tensor in (ids, positions, types))
        parts = self._forward(ids, positions, types, lengths)
        return [self._pool(part, request) for part, request in zip(parts, requests, strict=True)]

    def _pool(self, hidden: Tensor, request: EngineCoreRequest) -> Tensor:
        assert request.pooling_params is not None
        return self._pooler(hidden, request.prompt_token_ids, request.pooling_params).cpu()


def _types(request: EngineCoreRequest, length: int) -> Tensor:
    """Token types: 0, and 1 from the position that the parameters name."""
    extra = (request.pooling_params.extra_kwargs if request.pooling_params is not None else None) or {}
    first = extra.get("compressed_token_type_ids", length)
    return (torch.arange(length) >= first).long()
