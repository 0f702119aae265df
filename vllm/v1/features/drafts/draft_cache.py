"""Keys and values of layers that draft, beside the target's."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from vllm.attention.select import select_backend
from vllm.config import ModelConfig
from vllm.distributed.parallel_state import get_tp_group
from vllm.layers.attention import use_backend
from vllm.layers.kv_cache_spec import kv_cache_layout, kv_cache_specs, layer_kinds, without_windows
from vllm.v1.worker.gpu.input_batch import InputBatch
from vllm.v1.worker.gpu.states import NO_ID, BlockTables, KVCaches, RequestStates


class DraftCache:
    """Keys and values lie in blocks with the numbers of the request's own; those of tokens for which the request has no
    block yet lie in blocks of the slot's, and are computed again when it has.

    Attributes:
        tables: of the slots' requests, as of the last `map_blocks`.
        kv_caches: of each layer; empty until `allocate`.
    """

    def __init__(
        self, model: Any, config: ModelConfig, num_tokens: int, states: RequestStates, target_tables: BlockTables
    ) -> None:
        """`num_tokens`: those that are drafted at once, at most. `target_tables`: of the target's first KV group, whose
        blocks stay as long as the request."""
        self._states, self._target_tables, self._device = states, target_tables, states.device
        group, hf_config = get_tp_group(), config.hf_config
        specs = without_windows(kv_cache_specs(model, hf_config, group))
        self._layout = kv_cache_layout(specs, config.max_model_len)
        self._dtype = getattr(torch, config.dtype)
        self.block_size = target_tables.block_size
        sizes = self._dtype, hf_config.head_dim, self.block_size, self._dtype
        self._backend = select_backend("paged", self._device, *sizes, layer_kinds(model, hf_config, group))
        use_backend(model, self._backend)
        # For as many tokens as are computed beyond the request's blocks.
        self._own_blocks_a_slot = -(-(num_tokens + 1) // self.block_size)
        room = self._own_blocks_a_slot * self.block_size
        self.tables = BlockTables(states.max_num_reqs, states.token_ids.shape[1] + room, self.block_size, self._device)
        self.kv_caches: KVCaches = []
        self._first_own_block = 0

    @property
    def num_own_blocks(self) -> int:
        """Blocks beyond the target's."""
        return self._own_blocks_a_slot * self._states.max_num_reqs

    @property
    def block_bytes(self) -> int:
        """The bytes of keys and values in a block."""
        width = sum(spec.values_per_token for spec in self._layout.caches)
        return width * self.block_size * self._dtype.itemsize

    def allocate(self, num_blocks: int) -> None:
        """Beside a target's of `num_blocks`; 0: free them."""
        self.kv_caches = []
        if not num_blocks:
            return
        self._first_own_block = num_blocks
        num_blocks += self.num_own_blocks
        caches = []
        for spec in self._layout.caches:
            shapes = spec.cache_shapes(self._backend, num_blocks, self.block_size)
            caches.append(tuple(torch.empty(shape, dtype=self._dtype, device=self._device) for shape in shapes))
        self.kv_caches = [caches[index] for index in self._layout.cache_of_layer]

    def add_request(self, slot: int) -> None:
        """Another request has taken the slot."""
        self.tables.num_blocks[slot] = 0

    def map_blocks(self, slots: np.ndarray) -> None:
        """Bring the rows of `slots`, int64 [R], up to date: the request's blocks, then the slot's own."""
        num_own = self._own_blocks_a_slot
        counts = self._target_tables.num_blocks[slots]
        for slot, count in zip(slots.tolist(), counts.tolist(), strict=True):
            if self.tables.num_blocks[slot] != count + num_own:
                first = self._first_own_block + slot * num_own
                blocks = self._target_tables.table[slot, :count].tolist()
                self.tables.set_row(slot, [*blocks, *range(first, first + num_own)])
        self.tables.apply_staged_writes()

    def batch(self, slots: np.ndarray, counts: np.ndarray, ends: np.ndarray) -> InputBatch:
        """A step of `counts` tokens of each request, up to `ends`, both int32 [R], single tokens first."""
        starts = np.zeros(len(slots) + 1, dtype=np.int32)
        np.cumsum(counts, out=starts[1:])
        token_slots = np.repeat(slots, counts)
        positions = np.arange(starts[-1], dtype=np.int64) + np.repeat(ends - counts - starts[:-1], counts)
        num_decodes = int((counts == 1).sum())
        ids = self._states.token_ids[token_slots, positions]
        return InputBatch(
            req_ids=[""] * len(slots),
            idx_mapping_np=slots,
            num_scheduled_np=counts,
            seq_lens_np=ends.astype(np.int32),
            query_start_loc_np=starts,
            token_slots_np=token_slots,
            positions_np=positions,
            slot_mappings_np=(self.tables.slot_mapping(token_slots, positions),),
            input_ids_np=np.where(ids == NO_ID, 0, ids),
            max_query_len=int(counts.max()),
            max_seq_len=int(ends.max()),
            num_decodes=num_decodes,
            block_tables=(self.tables,),
            sampling_rows_np=np.arange(len(slots)),
            silent_rows_np=np.zeros(0, dtype=np.int64),
            hidden_rows_np=np.arange(starts[-1], dtype=np.int64),
            expanded_np=None if num_decodes == len(slots) else (np.arange(len(slots)), counts - 1),
        )


def take_tokens(starts: np.ndarray, ends: np.ndarray, most: int) -> tuple[np.ndarray, np.ndarray]:
    """Take the tokens from `starts` to `ends`, int32 [R], of requests, which are to be computed: rows, int64, and how
    many tokens of each, int32, one step of `most` tokens takes, single tokens first, as attention runs these apart;
    none: all are computed."""
    rows = np.flatnonzero(starts < ends)
    counts = ends[rows] - starts[rows]
    counts = np.minimum(counts, np.maximum(most - (np.cumsum(counts) - counts), 0))
    rows, counts = rows[counts > 0], counts[counts > 0]
    order = np.argsort(counts > 1, kind="stable")
    return rows[order], counts[order]
