"""Tokens that requests get in place of drawn ones (trace_decode_token_ids)."""

from __future__ import annotations

import numpy as np
from torch import Tensor

from vllm.sampling_params import SamplingParams
from vllm.v1.worker.gpu.buffer_utils import upload
from vllm.v1.worker.gpu.states import RequestStates


class TraceState:
    """The given continuations, by slot."""

    def __init__(self) -> None:
        self._traces: dict[int, np.ndarray] = {}

    @property
    def in_use(self) -> bool:
        return bool(self._traces)

    def add_request(self, slot: int, params: SamplingParams) -> None:
        self.remove_request(slot)
        if params.trace_decode_token_ids:
            self._traces[slot] = np.asarray(params.trace_decode_token_ids, dtype=np.int32)

    def remove_request(self, slot: int) -> None:
        self._traces.pop(slot, None)

    def uses(self, slots: np.ndarray) -> np.ndarray:
        return np.fromiter(map(self._traces.__contains__, slots.tolist()), dtype=bool, count=len(slots))

    def apply(self, token_ids: Tensor, slots: np.ndarray, states: RequestStates) -> None:
        """Put the given tokens in place of the drawn ones, int [R], where there are any."""
        rows = np.flatnonzero(self.uses(slots))
        if not rows.size:
            return
        own = slots[rows]
        num_generated = states.total_len[own] - states.prompt_len[own]
        given = [self._traces[slot][step] for slot, step in zip(own.tolist(), num_generated.tolist(), strict=True)]
        token_ids[upload(rows, token_ids.device)] = upload(np.asarray(given), token_ids.device).to(token_ids.dtype)
