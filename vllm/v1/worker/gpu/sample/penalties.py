"""Penalties on tokens that a request has already seen."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from vllm.sampling_params import SamplingParams
from vllm.v1.worker.gpu.buffer_utils import StagedTensor, upload
from vllm.v1.worker.gpu.sample.vocab import WHOLE, WholeVocab
from vllm.v1.worker.gpu.states import RequestStates


class PenaltiesState:
    """Repetition (over prompt and output), frequency and presence (over output alone) penalties by slot. Counts are
    taken from the request's token ids at every step instead of being kept, so none can be stale after a preemption or
    in a reused slot."""

    def __init__(self, max_num_reqs: int, device: torch.device, vocab: WholeVocab = WHOLE) -> None:
        self._vocab = vocab
        self.repetition = StagedTensor(max_num_reqs, torch.float32, device, fill=1.0)
        self.frequency = StagedTensor(max_num_reqs, torch.float32, device)
        self.presence = StagedTensor(max_num_reqs, torch.float32, device)

    def add_request(self, slot: int, params: SamplingParams) -> None:
        self.repetition.stage(slot, params.repetition_penalty)
        self.frequency.stage(slot, params.frequency_penalty)
        self.presence.stage(slot, params.presence_penalty)

    def apply_staged_writes(self) -> None:
        for table in (self.repetition, self.frequency, self.presence):
            table.apply_staged_writes()

    def uses(self, slots: np.ndarray) -> np.ndarray:
        counted = (self.frequency.np[slots] != 0.0) | (self.presence.np[slots] != 0.0)
        return counted | (self.repetition.np[slots] != 1.0)

    def apply(self, logits: Tensor, slots: np.ndarray, states: RequestStates) -> None:
        device = logits.device
        index = upload(slots, device)
        columns = self._vocab.columns(states.token_ids_tensor(slots).to(torch.int64))  # [R, W]
        position = torch.arange(columns.shape[1], device=device)
        known = position < upload(states.total_len[slots], device)[:, None]  # the rest is padding, or stale
        generated = known & (position >= upload(states.prompt_len[slots], device)[:, None])

        # A new value depends on its token alone, so a token at several positions (known or stale) is written several
        # times with one value, and no other token of the vocabulary is touched.
        values = logits.gather(1, columns)
        seen = _occurrences(columns, known, logits.shape[1]) > 0
        repetition = self.repetition.tensor[index][:, None]
        values = torch.where(seen, torch.where(values > 0, values / repetition, values * repetition), values)
        count = _occurrences(columns, generated, logits.shape[1])
        values -= self.frequency.tensor[index][:, None] * count
        values -= self.presence.tensor[index][:, None] * (count > 0)
        logits.scatter_(1, columns, values)


def _occurrences(columns: Tensor, counted: Tensor, num_columns: int) -> Tensor:
    """float32 [R, W]: how often each position's column occurs at the row's `counted` (bool [R, W]) positions. Exact:
    counts stay far below 2**24."""
    counts = torch.zeros((len(columns), num_columns), dtype=torch.float32, device=columns.device)
    counts.scatter_add_(1, columns, counted.to(torch.float32))
    return counts.gather(1, columns)
