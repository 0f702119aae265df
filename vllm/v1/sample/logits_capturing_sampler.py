"""Captures the model's logits of chosen token ids, for every sampled position."""

from __future__ import annotations

import uuid
from collections.abc import Iterable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from vllm.distributed.vocab_slice import VocabSlice
from vllm.layers.logits_processor_ext import check_indices


class LogitsCapturingSampler:
    """Wraps an engine's sampler and keeps the raw logits that it gets.

        capture = LogitsCapturingSampler([1, 2])
        capture.install(llm)
        llm.generate(prompts, params)
        logits = capture.get_captured_logits()

    Or `with LogitsCapturingSampler([1, 2]).install(llm) as capture:`, which uninstalls it at the end. Several can be
    installed at a time. Captured logits stay until `reset`. Each step waits for the device;
    `SamplingParams.logprob_token_ids` reads the same logits, their logprobs and ranks without that. Of several ranks,
    the first one, in the caller's process, gathers the chosen columns and keeps them.
    """

    def __init__(self, indices: Iterable[int] | None = None) -> None:
        """`indices` are I token ids, the columns to capture; None = the whole vocabulary. Raises VLLMValidationError
        for an index that is no integer, or negative."""
        self.indices = None if indices is None else check_indices("indices", indices)
        self._width = 0 if self.indices is None else len(self.indices)
        self._captured = _Captured()
        self._key = uuid.uuid4().hex  # identifies it on the ranks
        self._llm: Any = None

    def install(self, llm: Any) -> LogitsCapturingSampler:
        """Start to capture what `llm`, an LLM or LLMEngine in this process, samples.

        Raises:
            VLLMValidationError: an index outside the model's vocabulary; nothing is installed then.
            RuntimeError: it is installed already.
        """
        if self._llm is not None:
            raise RuntimeError("this LogitsCapturingSampler is installed already; uninstall() it first")
        self._width = llm.collective_rpc(_install, args=(self._key, self.indices, self._captured))[0]
        self._llm = llm
        return self

    def uninstall(self) -> None:
        """Stop capturing. Captured logits stay."""
        if self._llm is not None:
            self._llm.collective_rpc(_uninstall, args=(self._key,))
            self._llm = None

    def get_captured_logits(self, request_id: str | None = None) -> Tensor:
        """The logits captured so far, on the host.

        Args:
            request_id: only this request's rows. Sample i of a request for several is named f"{i}_{request_id}".

        Returns:
            float32 [rows, I], step by step, within a step in batch order, where requests that compute one token come
            first; one row a generated token, none for an unknown id.
        """
        rows = torch.cat([torch.empty(0, self._width), *self._captured.rows])
        if request_id is None:
            return rows
        return rows[[index for index, owner in enumerate(self._captured.request_ids) if owner == request_id]]

    def reset(self) -> None:
        self._captured.request_ids.clear()
        self._captured.rows.clear()

    def __enter__(self) -> LogitsCapturingSampler:
        return self

    def __exit__(self, *error: object) -> None:
        self.uninstall()


class _Captured:
    """The captured logits, on rank 0. A copy for another rank is empty and stays so."""

    def __init__(self) -> None:
        self.request_ids: list[str] = []
        self.rows: list[Tensor] = []  # one step each, float32 [L, I]

    def __reduce__(self) -> tuple[type[_Captured], tuple[()]]:
        return _Captured, ()


def _install(worker: Any, key: str, indices: list[int] | None, captured: _Captured) -> int:
    """Wrap the worker's sampler; returns the number of captured columns."""
    runner = worker.model_runner
    vocab_size = runner.model_config.vocab_size
    if indices is not None:
        check_indices("indices", indices, vocab_size)
    vocab_slice = VocabSlice(vocab_size, runner.group)
    runner.sampler = _CapturingSampler(runner.sampler, key, indices, captured, vocab_slice)
    return vocab_size if indices is None else len(indices)


def _uninstall(worker: Any, key: str) -> None:
    owner, name = worker.model_runner, "sampler"
    # Others may have been installed since, around this one.
    while getattr(owner, name).key != key:
        owner, name = getattr(owner, name), "inner"
    setattr(owner, name, getattr(owner, name).inner)


class _CapturingSampler:
    """Captures the logits, then calls the inner sampler, which has all other attributes."""

    is_followed = True

    def __init__(
        self, inner: Any, key: str, indices: list[int] | None, captured: _Captured, vocab_slice: VocabSlice
    ) -> None:
        self.inner = inner
        self.key = key
        self._indices = None if indices is None else torch.tensor(indices, dtype=torch.int64)
        self._captured = captured
        self._slice = vocab_slice

    def __call__(self, logits: Tensor, slots: np.ndarray, states: Any, *args: Any, **kwargs: Any) -> Any:
        self._capture(logits, slots, states)
        return self.inner(logits, slots, states, *args, **kwargs)

    def _capture(self, logits: Tensor, slots: np.ndarray, states: Any) -> None:
        if self._indices is None:
            chosen = self._slice.gather_rows(logits)
        else:
            chosen = self._slice.gather_columns(logits, self._indices.to(logits.device))
        if self._slice.group.rank:
            return
        # A copy: the logits' memory is reused, perhaps by the sampler itself.
        self._captured.rows.append(chosen.to("cpu", torch.float32, copy=True))
        names = {slot: request_id for request_id, slot in states.req_id_to_slot.items()}
        self._captured.request_ids += [names[slot] for slot in slots.tolist()]

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)
