"""Keeps the model's logits of chosen token ids, for every position that is sampled."""

from __future__ import annotations

from collections.abc import Iterable
from types import TracebackType
from typing import Any

import numpy as np
import torch
from torch import Tensor

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
        self._request_ids: list[str] = []
        self._rows: list[Tensor] = []  # one step each, float32 [L, I]
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
        llm.collective_rpc(self._wrap)
        self._llm = llm
        return self

    def uninstall(self) -> None:
        """Capture no more. What was captured stays."""
        if self._llm is not None:
            self._llm.collective_rpc(self._unwrap)
            self._llm = None

    def get_captured_logits(self, request_id: str | None = None) -> Tensor:
        """What was captured so far, on the host.

        Args:
            request_id: only this request's rows. Sample i of a request for several is named f"{i}_{request_id}".

        Returns:
            float32 [rows, I] in the order sampled: step by step, within a step in batch order. A request's own rows
            are one a generated token. No rows when the id is unknown.
        """
        rows = torch.cat([torch.empty(0, self._width), *self._rows])
        if request_id is None:
            return rows
        return rows[[index for index, owner in enumerate(self._request_ids) if owner == request_id]]

    def reset(self) -> None:
        """Forget what was captured."""
        self._request_ids = []
        self._rows = []

    def __enter__(self) -> LogitsCapturingSampler:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.uninstall()

    def _wrap(self, worker: Any) -> None:
        runner = worker.model_runner
        if self.indices is None:
            self._width = runner.model_config.vocab_size
        else:
            check_indices("indices", self.indices, runner.model_config.vocab_size)
        runner.sampler = _CapturingSampler(runner.sampler, self)

    def _unwrap(self, worker: Any) -> None:
        owner, name = worker.model_runner, "sampler"
        # Others may have been installed since, and stand before this one.
        while getattr(owner, name).capture is not self:
            owner, name = getattr(owner, name), "inner"
        setattr(owner, name, getattr(owner, name).inner)

    def _capture(self, logits: Tensor, request_ids: list[str]) -> None:
        chosen = logits
        if self.indices is not None:
            chosen = logits[:, torch.tensor(self.indices, dtype=torch.int64, device=logits.device)]
        # A copy: the logits' memory is used again, by the sampler itself perhaps.
        self._rows.append(chosen.to("cpu", torch.float32, copy=True))
        self._request_ids += request_ids


class _CapturingSampler:
    """A sampler that shows the logits to `capture` first; in all else it is the sampler within."""

    def __init__(self, inner: Any, capture: LogitsCapturingSampler) -> None:
        self.inner = inner
        self.capture = capture

    def __call__(self, logits: Tensor, slots: np.ndarray, states: Any, *args: Any, **kwargs: Any) -> Any:
        names = {slot: request_id for request_id, slot in states.req_id_to_slot.items()}
        self.capture._capture(logits, [names[slot] for slot in slots.tolist()])
        return self.inner(logits, slots, states, *args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)
