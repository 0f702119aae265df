"""Runs a model whose tokens see those after them, for whole requests side by side, and pools what it gives."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from vllm.attention.packed import PackedAttention, PackedSequences
from vllm.config import VllmConfig
from vllm.layers.attention import attention_layers, use_backend
from vllm.layers.pooler import Pooler
from vllm.models.transformers.encoder import TransformersEncoder
from vllm.models.vision.pair import PairEmbedder
from vllm.v1.core.sched.output import NewRequestData, SchedulerOutput
from vllm.v1.worker.gpu.guests import CacheSizes, RunnerGuest, hooks
from vllm.v1.worker.gpu.pool.step import PooledStep


def whole_sequences(model: Any) -> Callable[..., Sequence[Tensor]]:
    """A model's hidden states [L, H] of each of the sequences that follow one another; arguments as those of
    EncoderForPooling.forward."""
    layers = attention_layers(model)
    if isinstance(model, (TransformersEncoder, PairEmbedder)):
        return model
    if not layers:
        return lambda ids, positions, types, lengths, *more: model(ids, positions, types, lengths, *more).split(lengths)
    use_backend(model, PackedAttention())

    def forward(
        ids: Tensor,
        positions: Tensor,
        types: Tensor,
        lengths: Sequence[int],
        attended: Sequence[int] | None = None,
    ) -> Sequence[Tensor]:
        return model(ids, positions, [None] * len(layers), PackedSequences(lengths, attended), None).split(lengths)

    return forward


class EncoderRunner:
    """An encoder, or a decoder without its causal mask, with its pooler on one device: the calls of a GPUModelRunner
    that has no cache."""

    def __init__(
        self,
        config: VllmConfig,
        model: Any,
        device: torch.device,
        make_guests: Callable[[VllmConfig, Any], Sequence[RunnerGuest]] = lambda config, model: (),
    ) -> None:
        """`make_guests` is called with the configuration and the model. Of guests' methods those about slots and rows
        are called: a request's slot is its place in the step."""
        self.model, self.device = model, device
        self._forward = whole_sequences(model)
        own = getattr(model, "own_pooler", None)
        self._pooler = own or Pooler(config.model_config, device, getattr(model, "classify", None))
        self.guests = tuple(make_guests(config, model))
        self._on_remove, self._on_add = hooks(self.guests, "remove"), hooks(self.guests, "add")
        self._before_rows, self._before_request = (
            hooks(self.guests, "before_rows"),
            hooks(self.guests, "before_request"),
        )
        self._vectors = hooks(self.guests, "vector")
        self._num_slots = 0

    @torch.inference_mode()
    def execute_model(self, scheduler_output: SchedulerOutput) -> PooledStep:
        """Run a step of whole requests. The fewest attention calls are made for sorted lengths."""
        self.model.weight_updater.complete()
        requests = scheduler_output.scheduled_new_reqs
        if not requests:
            return PooledStep({})
        self._update_slots(scheduler_output)
        given = [self._given(slot) for slot in range(len(requests))]
        computed = iter(self._computed([each for each, own in zip(requests, given, strict=True) if own is None]))
        pooled = {}
        for slot, (own, each) in enumerate(zip(given, requests, strict=True)):
            for before_request in self._before_request:
                before_request(slot)
            pooled[each.req_id] = self._pool(next(computed) if own is None else own, each)
        return PooledStep(pooled)

    def _given(self, slot: int) -> Tensor | None:
        """The hidden states that a guest has in place of the model's."""
        return next((found for vector in self._vectors if (found := vector(slot)) is not None), None)

    def _computed(self, requests: Sequence[NewRequestData]) -> Sequence[Tensor]:
        """The model's hidden states of each request."""
        if not requests:
            return ()
        lengths = [each.num_prompt_tokens for each in requests]
        ids = torch.tensor([token_id for each in requests for token_id in each.prefill_token_ids])
        positions = torch.cat([torch.arange(length) for length in lengths])
        types = torch.cat([_types(each) for each in requests])
        ids, positions, types = (tensor.to(self.device) for tensor in (ids, positions, types))
        asked = (_extra(each).get("attended_tokens", length) for each, length in zip(requests, lengths, strict=True))
        attended = [min(pair) for pair in zip(asked, lengths, strict=True)]
        # A model that a caller registered may not know of them.
        more = () if attended == lengths else (attended,)
        return self._forward(ids, positions, types, lengths, *more)

    def _update_slots(self, step: SchedulerOutput) -> None:
        requests = step.scheduled_new_reqs
        for remove in self._on_remove:
            for slot in range(self._num_slots):
                remove(slot)
        self._num_slots = len(requests)
        for add in self._on_add:
            for slot, each in enumerate(requests):
                add(slot, each, step)
        for before_rows in self._before_rows:
            before_rows(np.repeat(np.arange(len(requests)), [each.num_prompt_tokens for each in requests]))

    def _pool(self, hidden: Tensor, request: NewRequestData) -> Tensor:
        assert request.pooling_params is not None
        return self._pooler(hidden, request.prefill_token_ids, request.pooling_params)

    def initialize_kv_cache(self, sizes: CacheSizes) -> None:
        """There is none."""

    def release_kv_cache(self) -> None:
        """There is none."""


def _types(request: NewRequestData) -> Tensor:
    """Token types: 0, and 1 from the position that the parameters name, or between two."""
    length = request.num_prompt_tokens
    named = _extra(request).get("compressed_token_type_ids", length)
    start, end = (named, length) if isinstance(named, int) else named
    places = torch.arange(length)
    return ((places >= start) & (places < end)).long()


def _extra(request: NewRequestData) -> dict[str, Any]:
    return (request.pooling_params.extra_kwargs if request.pooling_params is not None else None) or {}
