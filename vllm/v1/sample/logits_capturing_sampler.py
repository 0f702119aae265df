"""Keeps the model's logits of chosen token ids, for every position that is sampled."""

from __future__ import annotations

import uuid
from collections.abc import Iterable
from types import TracebackType
from typing import Any

import numpy as np
import torch
from torch import Tensor

from vllm.distributed.vocab_slice import VocabSlice
from vllm.model_executor.layers.logits_processor_ext import check_indices


class LogitsCapturingSampler:
    """Stands before an engine's sampler and keeps the raw logits that pass by.

        capture = LogitsCapturingSampler([1, 2])
        capture.install(llm)
        llm.generate(prompts, params)
        logits = capture.get_captured_logits()

    Or `with LogitsCapturingSampler([1, 2]).install(llm) as capture:`, which uninstalls it at the end. Several can be
    installed at a time. What was captured stays until `reset`. Each step waits for the device to hand its rows over;
    `SamplingParams.logprob_token_ids` reads the same logits without that, and their logprobs and ranks.

    Of several ranks, each hands its part of what is captured to the first one, in the caller's process, which keeps it:
    only the chosen columns travel, or whole rows where all are wanted.
    """

    def __init__(self, indices: Iterable[int] | None = None) -> None:
        """
        Args:
            indices: I token ids, the columns of what is captured; None = the whole vocabulary.

        Raises:
            VLLMValidationError: an index that is no integer, or negative.
        """
        self.indices = None if indices is None else check_indices("indices", indices)
        self._width = 0 if self.indices is None else len(self.indices)
        self._captured = _Captured()
        self._key = uuid.uuid4().hex  # by which the ranks know it
        self._llm: Any = None

    def install(self, llm: Any) -> LogitsCapturingSampler:
        """Capture from now on what `llm` samples.

        Args:
            llm: an LLM or LLMEngine that runs in this process.

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
        """Capture no more. What was captured stays."""
        if self._llm is not None:
            self._llm.collective_rpc(_uninstall, args=(self._key,))
            self._llm = None

    def get_captured_logits(self, request_id: str | None = None) -> Tensor:
        """What was captured so far, on the host.

        Args:
            request_id: only this request's rows. Sample i of a request for several is named f"{i}_{request_id}".

        Returns:
            float32 [rows, I] in the order sampled: step by step, within a step in batch order. A request's own rows
            are one a generated token. No rows when the id is unknown.
        """
        rows = torch.cat([torch.empty(0, self._width), *self._captured.rows])
        if request_id is None:
            return rows
        return rows[[index for index, owner in enumerate(self._captured.request_ids) if owner == request_id]]

    def reset(self) -> None:
        """Forget what was captured."""
        self._captured.request_ids.clear()
        self._captured.rows.clear()

    def __enter__(self) -> LogitsCapturingSampler:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.uninstall()


class _Captured:
    """What was captured: rank 0's. A copy for another rank is empty, and stays so."""

    def __init__(self) -> None:
        self.request_ids: list[str] = []
        self.rows: list[Tensor] = []  # one step each, float32 [L, I]

    def __reduce__(self) -> tuple[type[_Captured], tuple[()]]:
        return _Captured, ()


def _install(worker: Any, key: str, indices: list[int] | None, captured: _Captured) -> int:
    """Put a capturing sampler before the worker's; how many columns it captures."""
    runner = worker.model_runner
    vocab_size = runner.model_config.vocab_size
    if indices is not None:
        check_indices("indices", indices, vocab_size)
    vocab_slice = VocabSlice(vocab_size, runner.group)
    runner.sampler = _CapturingSampler(runner.sampler, key, indices, captured, vocab_slice)
    return vocab_size if indices is None else len(indices)


def _uninstall(worker: Any, key: str) -> None:
    owner, name = worker.model_runner, "sampler"
    # Others may have been installed since, and stand before this one.
    while getattr(owner, name).key != key:
        owner, name = getattr(owner, name), "inner"
    setattr(owner, name, getattr(owner, name).inner)


class _CapturingSampler:
    """A sampler that captures the logits first; in all else it is the sampler within."""

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
        # A copy: the logits' memory is used again, by the sampler itself perhaps.
        self._captured.rows.append(chosen.to("cpu", torch.float32, copy=True))
        names = {slot: request_id for request_id, slot in states.req_id_to_slot.items()}
        self._captured.request_ids += [names[slot] for slot in slots.tolist()]

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)
