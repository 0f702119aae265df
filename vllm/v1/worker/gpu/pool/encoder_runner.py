"""Runs an encoder for whole requests side by side, and pools what it gives."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from vllm.config import VllmConfig
from vllm.model_executor.layers.pooler import Pooler
from vllm.model_executor.model_loader import get_model
from vllm.transformers_utils.sentence_transformers import (
    SentencePooling,
    classifier_activation,
    read_pooling,
    warn_of_unread,
)
from vllm.v1.messages import EngineCoreRequest


class EncoderRunner:
    """An encoder with its pooler on one device."""

    def __init__(self, config: VllmConfig, use_tqdm: bool = False) -> None:
        model_config = config.model_config
        self.device = torch.device(config.device_config.device)
        self.model: Any = get_model(model_config, self.device, use_tqdm)
        folder = Path(model_config.path)
        warn_of_unread(folder)
        pooling = read_pooling(folder) or SentencePooling()
        self.pooler = Pooler(model_config.pooler_config.applied_to(pooling), self.device)
        self._use_activation = model_config.pooler_config.use_activation
        raw = model_config.hf_config.raw
        problem = {"multi_label_classification": "sigmoid", "regression": "identity"}.get(str(raw.get("problem_type")))
        self._activation = classifier_activation(raw) or problem

    @torch.inference_mode()
    def run(self, requests: Sequence[EngineCoreRequest]) -> list[Tensor]:
        """The float32 result of each request, on the CPU. The fewest attention calls are made for sorted lengths."""
        lengths = [len(request.prompt_token_ids) for request in requests]
        ids = torch.tensor([each for request in requests for each in request.prompt_token_ids])
        positions = torch.cat([torch.arange(length) for length in lengths])
        types = torch.cat([_types(request, length) for request, length in zip(requests, lengths, strict=True)])
        inputs = (tensor.to(self.device) for tensor in (ids, positions, types))
        hidden = self.model(*inputs, lengths)
        parts = hidden.split(lengths)
        return [self._pool(part, request).cpu() for part, request in zip(parts, requests, strict=True)]

    def _pool(self, hidden: Tensor, request: EngineCoreRequest) -> Tensor:
        params = request.pooling_params
        assert params is not None
        activate = params.use_activation
        if activate is None:
            activate = self._use_activation
        if params.task == "classify":
            return self._classify(hidden, activate)
        vectors = hidden.float() if params.task == "token_embed" else self.pooler.pool(hidden)
        return self.pooler.finish(vectors, activate, params.dimensions)

    def _classify(self, hidden: Tensor, activate: bool | None) -> Tensor:
        logits = self.model.classify(hidden[:1])[0]
        name = self._activation
        if activate is False or (activate is None and name == "identity"):
            return logits
        if name in (None, "identity"):
            # One label has a probability of its own.
            name = "sigmoid" if len(logits) == 1 else "softmax"
        return logits.sigmoid() if name == "sigmoid" else logits.softmax(-1)


def _types(request: EngineCoreRequest, length: int) -> Tensor:
    """Token types: 0, and 1 from the position that the parameters name."""
    extra = (request.pooling_params.extra_kwargs if request.pooling_params is not None else None) or {}
    first = extra.get("compressed_token_type_ids", length)
    return (torch.arange(length) >= first).long()
