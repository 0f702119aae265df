"""Slot state of sampling: temperature, truncation, seeds and readings of each request."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator

import numpy as np
import torch

from vllm.sampling_params import SamplingParams
from vllm.v1.worker.gpu.buffer_utils import StagedTensor

_UNRESTRICTED_TOP_K = np.iinfo(np.int32).max
# Rows with more are read apart from the others, which would otherwise be read at their width.
_WIDE_TOPK = 64
_WIDE_TOKEN_IDS = 128


class Reads:
    """Bits of what a request reads of its positions; requests with equal bits are read together. 0: nothing. Plain
    integers: an enum's operators take longer than the rest of the grouping."""

    ANYTHING = 1
    WIDE_TOPK = 2
    WIDE_TOKEN_IDS = 4
    ENTROPY = 8
    PROCESSED = 16  # a processed_* mode
    CANDIDATES = 32  # a beam's: the most likely tokens after processing, in either mode


class SamplingStates:
    """S slots. Staged tensors feed device code; their `np` copies, and the plain arrays, show the sampler what a batch
    needs without a read from the device."""

    def __init__(self, max_num_reqs: int, vocab_size: int, device: torch.device, seed: int = 0) -> None:
        """`seed` is the engine's, from which requests without one get theirs."""
        self.vocab_size = vocab_size
        self._engine_seed = seed
        self.temperature = StagedTensor(max_num_reqs, torch.float32, device)  # 0 = greedy
        self.top_k = StagedTensor(max_num_reqs, torch.int32, device, fill=_UNRESTRICTED_TOP_K)
        self.top_p = StagedTensor(max_num_reqs, torch.float32, device, fill=1.0)
        self.log_min_p = StagedTensor(max_num_reqs, torch.float32, device, fill=-math.inf)
        self.seeds = StagedTensor(max_num_reqs, torch.int64, device)
        self.num_topk = np.zeros(max_num_reqs, dtype=np.int32)  # [S], the request's K, at most V
        self.topk_version = 0  # counts the changes of num_topk
        self.reads = np.zeros(max_num_reqs, dtype=np.int8)  # [S], bits of Reads

    def add_request(self, slot: int, params: SamplingParams, request_id: str) -> None:
        """Stage everything of a request that takes `slot`. Without a seed it gets a function of the engine's seed and
        `request_id`: the same after a preemption and in any order of admission."""
        greedy = params.is_greedy
        self.temperature.stage(slot, 0.0 if greedy else params.temperature)
        # Truncation never removes the most likely token, so greedy rows need none.
        top_k = params.top_k if not greedy and 0 < params.top_k < self.vocab_size else _UNRESTRICTED_TOP_K
        self.top_k.stage(slot, top_k)
        self.top_p.stage(slot, 1.0 if greedy else params.top_p)
        self.log_min_p.stage(slot, math.log(params.min_p) if params.min_p > 0 and not greedy else -math.inf)
        self.seeds.stage(slot, self._draw_seed(request_id) if params.seed is None else params.seed)
        num_topk = params.logprobs or 0
        num_topk = self.vocab_size if num_topk == -1 else min(num_topk, self.vocab_size)
        self.topk_version += int(num_topk != self.num_topk[slot])
        self.num_topk[slot] = num_topk
        self.reads[slot] = self._kind(params, num_topk)

    @staticmethod
    def _kind(params: SamplingParams, num_topk: int) -> int:
        if params.num_logprobs is None:
            return 0
        return (
            Reads.ANYTHING
            | Reads.WIDE_TOPK * (num_topk > _WIDE_TOPK)
            | Reads.WIDE_TOKEN_IDS * (len(params.logprob_token_ids or ()) > _WIDE_TOKEN_IDS)
            | Reads.ENTROPY * bool(params.logprob_entropy)
            | Reads.PROCESSED * (params.logprobs_mode or "").startswith("processed")
            | Reads.CANDIDATES * (params._beam_length is not None)
        )

    def _draw_seed(self, request_id: str) -> int:
        digest = hashlib.blake2b(f"{self._engine_seed}\0{request_id}".encode(), digest_size=8).digest()
        return int.from_bytes(digest, "little", signed=True)

    def apply_staged_writes(self) -> None:
        for table in (self.temperature, self.top_k, self.top_p, self.log_min_p, self.seeds):
            table.apply_staged_writes()

    def reading_groups(self, slots: np.ndarray, by_mode: bool) -> Iterator[tuple[np.ndarray, int]]:
        """Split rows so that none is read at another's width or entropy: int64 [G] rows and their bits of Reads. With
        `by_mode`, raw and processed modes and candidates are apart too; without, their bits are not set."""
        kinds = self.reads[slots]
        if not by_mode:
            kinds &= ~(Reads.PROCESSED | Reads.CANDIDATES)
        if (kinds == kinds[:1]).all():
            if len(kinds):
                yield np.arange(len(kinds)), int(kinds[0])
            return
        for kind in np.unique(kinds).tolist():
            yield np.flatnonzero(kinds == kind), kind

    # The following return bool [R], by slot.

    def is_greedy(self, slots: np.ndarray) -> np.ndarray:
        return self.temperature.np[slots] == 0.0

    def uses_top_k(self, slots: np.ndarray) -> np.ndarray:
        return self.top_k.np[slots] != _UNRESTRICTED_TOP_K

    def uses_top_p(self, slots: np.ndarray) -> np.ndarray:
        return self.top_p.np[slots] < 1.0

    def uses_min_p(self, slots: np.ndarray) -> np.ndarray:
        return self.log_min_p.np[slots] > -math.inf

    def cuts(self, slots: np.ndarray) -> np.ndarray:
        return self.uses_top_k(slots) | self.uses_top_p(slots) | self.uses_min_p(slots)
