"""Slot state: what the runner keeps of a request from admission to finish."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch

from vllm.v1.worker.gpu.buffer_utils import upload

UNKNOWN = -1
"""In place of the id of a token that the step in flight draws."""


class Places(NamedTuple):
    """Where the tokens that a step draws for R requests belong."""

    slots: np.ndarray  # int [R]
    positions: np.ndarray  # int32 [R]
    owners: np.ndarray  # int64 [R], which of the slot's requests


class RequestStates:
    """Token ids and lengths of the requests that own a slot. S = max_num_reqs, N = max_model_len.

    Arrays live on the host, where a step's inputs are gathered; `token_ids_tensor` shows them to device code.

    A step may begin before the tokens of the one before are on the host: they have their places then, count, and read
    UNKNOWN there, while the device takes them from `last_sampled`.
    """

    def __init__(
        self, max_num_reqs: int, max_model_len: int, device: torch.device, async_scheduling: bool = False
    ) -> None:
        self.max_num_reqs = max_num_reqs
        self.device = device
        self.req_id_to_slot: dict[str, int] = {}
        # Popping from the end hands out low slots first, which keeps the touched part of the tables small.
        self._free_slots = list(range(max_num_reqs - 1, -1, -1))
        self.token_ids = np.zeros((max_num_reqs, max_model_len + 1), dtype=np.int32)  # [S, N + 1]
        self.prompt_len = np.zeros(max_num_reqs, dtype=np.int32)  # [S]
        self.total_len = np.zeros(max_num_reqs, dtype=np.int32)  # [S], known tokens: prompt and generated
        self.num_computed_tokens = np.zeros(max_num_reqs, dtype=np.int32)  # [S], tokens whose KV is written
        self.owners = np.zeros(max_num_reqs, dtype=np.int64)  # [S], the number of the slot's request
        self._num_added = 0
        # int32 [S + 1] on the device: the token that each slot's request drew last; the last row is nobody's. None:
        # no step begins before the tokens of the one before are known.
        self.last_sampled: torch.Tensor | None = None
        if async_scheduling:
            self.last_sampled = torch.zeros(max_num_reqs + 1, dtype=torch.int32, device=device)
        self.samples = np.zeros(max_num_reqs, dtype=bool)  # [S], max_tokens is not 0
        self.reads_next = np.zeros(max_num_reqs, dtype=bool)  # [S], the logits after the last known token are wanted

    def add_request(
        self,
        req_id: str,
        token_ids: list[int],
        prompt_len: int,
        num_computed_tokens: int,
        samples: bool = True,
        reads_next: bool = True,
    ) -> int:
        """Give the request a slot and fill it.

        Raises:
            RuntimeError: no slot is free (the scheduler admits at most max_num_seqs requests).
        """
        if not self._free_slots:
            raise RuntimeError(f"no free slot for request {req_id}: all {self.max_num_reqs} are in use")
        slot = self._free_slots.pop()
        self.req_id_to_slot[req_id] = slot
        self._num_added += 1
        self.owners[slot] = self._num_added
        self.token_ids[slot, : len(token_ids)] = token_ids
        self.prompt_len[slot] = prompt_len
        self.total_len[slot] = len(token_ids)
        self.num_computed_tokens[slot] = num_computed_tokens
        self.samples[slot] = samples
        self.reads_next[slot] = reads_next
        return slot

    def remove_request(self, req_id: str) -> int | None:
        """Free the request's slot; returns it, or None when the request owns none."""
        slot = self.req_id_to_slot.pop(req_id, None)
        if slot is not None:
            self._free_slots.append(slot)
        return slot

    def append_sampled(self, slots: np.ndarray, sampled_token_ids: np.ndarray) -> None:
        """Add one generated token to each of `slots` (int [R], distinct)."""
        self.token_ids[slots, self.total_len[slots]] = sampled_token_ids
        self.total_len[slots] += 1

    def reserve(self, slots: np.ndarray) -> Places:
        """Make room for a token that each of `slots` (int [R], distinct) has drawn; `fill` tells which."""
        places = Places(slots, self.total_len[slots], self.owners[slots])
        self.append_sampled(slots, np.full(len(slots), UNKNOWN, dtype=np.int32))
        return places

    def fill(self, places: Places, sampled_token_ids: np.ndarray) -> None:
        """The reserved tokens are known: int32 [R]. Requests that have left their slots do without."""
        stay = self.owners[places.slots] == places.owners
        self.token_ids[places.slots[stay], places.positions[stay]] = sampled_token_ids[stay]

    def keep_sampled(self, slots: torch.Tensor, sampled_token_ids: torch.Tensor) -> None:
        """Keep what was drawn, int32 [R], for `known` of the next step.

        Args:
            slots: int64 [R].
        """
        assert self.last_sampled is not None
        self.last_sampled.index_copy_(0, slots, sampled_token_ids)

    def known(self, token_ids: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
        """Token ids, int32 [T, ...], of requests in `slots`, int64 [T]: the UNKNOWN ones put in."""
        assert self.last_sampled is not None
        drawn = self.last_sampled[slots]
        return torch.where(token_ids < 0, drawn if token_ids.dim() == 1 else drawn[:, None], token_ids)

    def token_ids_tensor(self, slots: np.ndarray) -> torch.Tensor:
        """Token ids of some slots on the device: int32 [R, max total_len among them]."""
        width = int(self.total_len[slots].max(initial=0))
        token_ids = upload(self.token_ids[slots, :width], self.device)
        return token_ids if self.last_sampled is None else self.known(token_ids, upload(slots, self.device))
