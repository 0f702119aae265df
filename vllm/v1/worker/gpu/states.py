"""Slot state: what the runner keeps of a request from admission to finish."""

from __future__ import annotations

import numpy as np
import torch

from vllm.v1.worker.gpu.buffer_utils import upload


class RequestStates:
    """Token ids and lengths of the requests that own a slot. S = max_num_reqs, N = max_model_len.

    Arrays live on the host, where a step's inputs are gathered; `token_ids_tensor` shows them to device code.
    """

    def __init__(self, max_num_reqs: int, max_model_len: int, device: torch.device) -> None:
        self.max_num_reqs = max_num_reqs
        self.device = device
        self.req_id_to_slot: dict[str, int] = {}
        # Popping from the end hands out low slots first, which keeps the touched part of the tables small.
        self._free_slots = list(range(max_num_reqs - 1, -1, -1))
        self.token_ids = np.zeros((max_num_reqs, max_model_len + 1), dtype=np.int32)  # [S, N + 1]
        self.prompt_len = np.zeros(max_num_reqs, dtype=np.int32)  # [S]
        self.total_len = np.zeros(max_num_reqs, dtype=np.int32)  # [S], known tokens: prompt and generated
        self.num_computed_tokens = np.zeros(max_num_reqs, dtype=np.int32)  # [S], tokens whose KV is written
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

    def token_ids_tensor(self, slots: np.ndarray) -> torch.Tensor:
        """Token ids of some slots on the device: int32 [R, max total_len among them]."""
        width = int(self.total_len[slots].max(initial=0))
        return upload(self.token_ids[slots, :width], self.device)
