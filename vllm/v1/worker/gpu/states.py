"""Slot state: what the runner keeps of a request from admission to finish."""

from __future__ import annotations

from itertools import chain
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from vllm.ops.block_copies import block_parts, copy_blocks_
from vllm.v1.worker.gpu.buffer_utils import upload, upload_all

UNKNOWN = -1
"""Placeholder id of a token that a step in flight samples."""

NO_ID = -2
"""In place of the id at a position that has an embedding, but no token."""

KVCaches = list[tuple[Tensor, ...]]
"""Keys and values of each layer, or the rows of latent attention; contiguous, blocks first."""


class Places(NamedTuple):
    """Where the tokens that a step samples for R requests belong."""

    slots: np.ndarray  # int [R]
    positions: np.ndarray  # int32 [R]
    owners: np.ndarray  # int64 [R], the number of the slot's request


class RequestStates:
    """Token ids and lengths of the requests that own a slot, on the host. S = max_num_reqs, N = max_model_len. With
    async_scheduling a step may begin before the last one's tokens are on the host: these are reserved as UNKNOWN in
    `token_ids` and counted, and device code takes them from `last_sampled`."""

    def __init__(
        self, max_num_reqs: int, max_model_len: int, device: torch.device, async_scheduling: bool = False
    ) -> None:
        self.max_num_reqs = max_num_reqs
        self.device = device
        self.req_id_to_slot: dict[str, int] = {}
        # Low slots are taken first, which keeps the touched part of the tables small.
        self._free_slots = list(range(max_num_reqs - 1, -1, -1))
        self.token_ids = np.zeros((max_num_reqs, max_model_len + 1), dtype=np.int32)  # [S, N + 1]
        self.prompt_len = np.zeros(max_num_reqs, dtype=np.int32)  # [S]
        self.total_len = np.zeros(max_num_reqs, dtype=np.int32)  # [S], known tokens: prompt and generated
        self.num_computed_tokens = np.zeros(max_num_reqs, dtype=np.int32)  # [S], tokens whose KV is written
        self.owners = np.zeros(max_num_reqs, dtype=np.int64)  # [S], the number of the slot's request
        self._num_added = 0
        # int32 [S + 1] on the device: each slot's last sampled token; the last row is for padding. None: no async.
        self.last_sampled: Tensor | None = None
        if async_scheduling:
            self.last_sampled = torch.zeros(max_num_reqs + 1, dtype=torch.int32, device=device)
        self.samples = np.zeros(max_num_reqs, dtype=bool)  # [S], max_tokens is not 0
        self.num_tentative = np.zeros(max_num_reqs, dtype=np.int32)  # [S], see `place_tentative`
        self.has_tentative = False
        self.reads_next = np.zeros(max_num_reqs, dtype=bool)  # [S], the logits after the last known token are needed

    def add_request(
        self,
        req_id: str,
        token_ids: list[int],
        prompt_len: int,
        num_computed_tokens: int,
        samples: bool = True,
        reads_next: bool = True,
    ) -> int:
        """Give the request a slot and fill it. RuntimeError: all slots are in use."""
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
        lengths = self.total_len[slots]
        self.token_ids[slots, lengths] = sampled_token_ids
        self.total_len[slots] = lengths + 1

    def append_run(self, slot: int, token_ids: list[int]) -> None:
        """Add tokens that were not sampled."""
        start = self.total_len[slot]
        self.token_ids[slot, start : start + len(token_ids)] = token_ids
        self.total_len[slot] += len(token_ids)

    def place_tentative(self, slot: int, token_ids: list[int]) -> None:
        """Write tokens that the next step computes after the known ones. They do not count until they are appended."""
        start = self.total_len[slot]
        self.token_ids[slot, start : start + len(token_ids)] = token_ids
        self.num_tentative[slot] = len(token_ids)
        self.has_tentative = True

    def take_tentative(self, slots: np.ndarray) -> np.ndarray | int:
        """int32 [R], how many were placed for the step that is built; 0: none."""
        if not self.has_tentative:
            return 0
        counts, self.has_tentative = self.num_tentative[slots], False
        self.num_tentative[:] = 0
        return counts

    def reserve(self, slots: np.ndarray) -> Places:
        """Append UNKNOWN to each of `slots` (int [R], distinct), to be replaced by `fill`."""
        places = Places(slots, self.total_len[slots], self.owners[slots])
        self.append_sampled(slots, np.full(len(slots), UNKNOWN, dtype=np.int32))
        return places

    def fill(self, places: Places, sampled_token_ids: np.ndarray) -> None:
        """Write reserved tokens, int32 [R], of the requests that still own their slots."""
        stay = self.owners[places.slots] == places.owners
        self.token_ids[places.slots[stay], places.positions[stay]] = sampled_token_ids[stay]

    def keep_sampled(self, slots: Tensor, sampled_token_ids: Tensor) -> None:
        """Keep sampled tokens, int32 [R], of `slots`, int64 [R], for `known` in the next step."""
        assert self.last_sampled is not None
        self.last_sampled.index_copy_(0, slots, sampled_token_ids)

    def known(self, token_ids: Tensor, slots: Tensor) -> Tensor:
        """Token ids, int32 [T, ...], of `slots`, int64 [T], with each UNKNOWN replaced by the slot's last sample."""
        assert self.last_sampled is not None
        drawn = self.last_sampled[slots]
        return torch.where(token_ids == UNKNOWN, drawn if token_ids.dim() == 1 else drawn[:, None], token_ids)

    def token_ids_tensor(self, slots: np.ndarray) -> Tensor:
        """Token ids of some slots on the device: int32 [R, max total_len among them]."""
        width = int(self.total_len[slots].max(initial=0))
        token_ids = upload(self.token_ids[slots, :width], self.device)
        return token_ids if self.last_sampled is None else self.known(token_ids, upload(slots, self.device))


class BlockTables:
    """The KV block ids of each slot's request, in order, and in the last row those of padding: int32 [S + 1, B], in
    `table` on the host and in `tensor` on the device. On CPU both are the same memory. On CUDA `apply_staged_writes`
    uploads the blocks that were added since the last call."""

    def __init__(self, max_num_reqs: int, max_model_len: int, block_size: int, device: torch.device) -> None:
        self.block_size = block_size
        shape = (max_num_reqs + 1, -(-(max_model_len + 1) // block_size))
        # NumPy's zeros take no memory for what is not written.
        self.table = np.zeros(shape, dtype=np.int32)  # [S + 1, B]
        self.num_blocks = np.zeros(max_num_reqs + 1, dtype=np.int32)  # [S + 1]
        is_on_host = device.type == "cpu"
        self.tensor = (
            torch.from_numpy(self.table) if is_on_host else torch.zeros(shape, dtype=torch.int32, device=device)
        )
        self._staged: list[tuple[int, list[int]]] = []  # place in the flat table, block ids; no place twice

    def set_row(self, slot: int, block_ids: list[int]) -> None:
        self.num_blocks[slot] = 0
        self.append(slot, block_ids)

    def append(self, slot: int, block_ids: list[int]) -> None:
        """Add blocks at the end of the slot's row."""
        start = int(self.num_blocks[slot])
        self.table[slot, start : start + len(block_ids)] = block_ids
        self.num_blocks[slot] = start + len(block_ids)
        if self.tensor.device.type != "cpu" and block_ids:
            self._staged.append((slot * self.table.shape[1] + start, block_ids))

    def apply_staged_writes(self) -> None:
        """Make added blocks visible on the device; once a step, in which a slot's row is set at most once."""
        if not self._staged:
            return
        places = np.concatenate([np.arange(start, start + len(ids), dtype=np.int64) for start, ids in self._staged])
        block_ids = np.fromiter(chain.from_iterable(ids for _, ids in self._staged), np.int32, len(places))
        self._staged.clear()
        self.tensor.view(-1).index_copy_(0, *upload_all([places, block_ids], self.tensor.device))

    def rows(self, slots: Tensor, max_seq_len: int) -> Tensor:
        """int32 [R, ceil(max_seq_len / block_size)]: the rows of `slots`, int64 [R], as wide as the longest needs."""
        return self.tensor[:, : -(-max_seq_len // self.block_size)].index_select(0, slots)

    def slot_mapping(self, slots: np.ndarray, positions: np.ndarray) -> np.ndarray:
        """int64 [T]: the KV cache slot of each token, given its request's slot and its position (both [T])."""
        blocks = self.table[slots, positions // self.block_size].astype(np.int64)
        return blocks * self.block_size + positions % self.block_size


class BlockCopies:
    """
    Attributes:
        caches: the tensors that have a part of a block, [B, size of the part], each once.
        parts: the same, as `copy_blocks_` takes them.
    """

    def __init__(self, tensors: KVCaches) -> None:
        # Layers that share a cache have it once.
        own = {cache.data_ptr(): cache for group in tensors for cache in group}
        # Bytes, where elements are 8-bit floats, which torch does not copy by index everywhere, or of several kinds.
        are_bytes = len({c.dtype for c in own.values()}) > 1 or any(c.element_size() == 1 for c in own.values())
        self.caches = [(c.view(torch.uint8) if are_bytes else c).view(len(c), -1) for c in own.values()]
        if self.caches:
            self.device = self.caches[0].device
            self.parts = block_parts(self.caches)

    def copy(self, pairs: list[tuple[int, int]]) -> None:
        """Copy (block, its copy), the copies distinct. All blocks are read before a copy is written."""
        if not pairs or not self.caches:
            return
        sources, targets = zip(*pairs, strict=True)
        ids = self.ids(list(sources)), self.ids(list(targets))
        if set(sources).isdisjoint(targets):
            copy_blocks_(*ids, self.parts, self.parts)
            return
        for cache in self.caches:
            cache.index_copy_(0, ids[1], cache.index_select(0, ids[0]))

    def ids(self, block_ids: list[int]) -> Tensor:
        """int64 [N], on the device."""
        return upload(np.array(block_ids, dtype=np.int64), self.device)
