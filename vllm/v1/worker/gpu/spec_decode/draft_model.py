"""Drafts of a smaller model with the same vocabulary."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from vllm.attention.select import select_backend
from vllm.config import ModelConfig, VllmConfig
from vllm.distributed.parallel_state import get_tp_group
from vllm.layers.attention import use_backend
from vllm.layers.kv_cache_spec import kv_cache_layout, kv_cache_specs, layer_kinds
from vllm.layers.state import state_layers
from vllm.loader import get_model
from vllm.ops.recording import can_record
from vllm.v1.worker.gpu.buffer_utils import upload
from vllm.v1.worker.gpu.input_batch import InputBatch
from vllm.v1.worker.gpu.recorded_decode import RecordedDecode
from vllm.v1.worker.gpu.sample.vocab_parallel import vocab_of
from vllm.v1.worker.gpu.states import BlockTables, KVCaches, RequestStates

NO_DRAFT = np.zeros(0, dtype=np.int32)


class DraftModelDrafter:
    """Drafts greedily. The draft's keys and values lie in blocks with the numbers of the request's own; those of tokens
    for which the request has no block yet lie in blocks of the slot's, and are computed again when it has. What the
    prefix cache holds was computed by the target alone, so a request's first draft takes all its tokens."""

    def __init__(self, config: VllmConfig, states: RequestStates, tables: BlockTables) -> None:
        """Loads this rank's share of the draft. `tables`: of the target's first KV group, whose blocks stay as long as
        the request. ValueError: the draft has recurrent states."""
        speculative = config.speculative_config
        assert speculative is not None and speculative.num_speculative_tokens is not None
        self._config: ModelConfig = speculative.draft_model_config
        self._states, self._target_tables = states, tables
        self._group, self._device = get_tp_group(), states.device
        self._vocab = vocab_of(self._config.vocab_size, self._group)
        self._max_tokens = config.scheduler_config.max_num_batched_tokens
        self.model: Any = get_model(self._config, self._device)
        if state_layers(self.model):
            raise ValueError(
                f"speculative_config: model={speculative.model!r} cannot draft, as its layers have recurrent states; "
                "take a draft without them, or method='ngram' or 'suffix'"
            )
        hf_config = self._config.hf_config
        self._longest = min(self._config.max_model_len, config.model_config.max_model_len)
        # Layers with windows keep all tokens, too: they share the one table.
        specs = [spec._replace(window=None) for spec in kv_cache_specs(self.model, hf_config, self._group)]
        self._layout = kv_cache_layout(specs, self._longest)
        self._dtype = getattr(torch, self._config.dtype)
        sizes = self._dtype, hf_config.head_dim, tables.block_size, self._dtype
        self._backend = select_backend("paged", self._device, *sizes, layer_kinds(self.model, hf_config, self._group))
        use_backend(self.model, self._backend)
        max_num_reqs = states.max_num_reqs
        # For as many tokens as are computed beyond the request's blocks.
        self._own_blocks_a_slot = -(-(speculative.num_speculative_tokens + 1) // tables.block_size)
        room = self._own_blocks_a_slot * tables.block_size
        self._tables = BlockTables(max_num_reqs, states.token_ids.shape[1] + room, tables.block_size, self._device)
        self._kv_caches: KVCaches = []
        self._first_own_block = 0
        self._records = not config.model_config.enforce_eager and self._group.world_size == 1
        self._recorded: RecordedDecode | None = None
        self._begun = np.zeros(max_num_reqs, dtype=np.int32)  # [S], the tokens that the last draft followed
        self._written = np.zeros(max_num_reqs, dtype=np.int32)  # [S], tokens with keys and values, its own included
        self._drafts = [NO_DRAFT] * max_num_reqs

    @property
    def num_own_blocks(self) -> int:
        """Blocks of the draft's cache beyond the target's."""
        return self._own_blocks_a_slot * self._states.max_num_reqs

    @property
    def block_bytes(self) -> int:
        """Of the draft's keys and values in a block."""
        width = sum(spec.values_per_token for spec in self._layout.caches)
        return width * self._tables.block_size * self._dtype.itemsize

    def allocate(self, num_blocks: int) -> None:
        """Allocate the draft's cache, beside a target's of `num_blocks`; 0: free it."""
        self._kv_caches, self._recorded = [], None
        if not num_blocks:
            return
        self._first_own_block = num_blocks
        num_blocks += self.num_own_blocks
        caches = []
        for spec in self._layout.caches:
            shapes = spec.cache_shapes(self._backend, num_blocks, self._tables.block_size)
            caches.append(tuple(torch.empty(shape, dtype=self._dtype, device=self._device) for shape in shapes))
        self._kv_caches = [caches[index] for index in self._layout.cache_of_layer]
        if self._records and can_record(self._tables.tensor):
            parts = self.model, self._kv_caches, self._states, self._tables
            self._recorded = RecordedDecode(*parts, self._states.max_num_reqs)

    def add_request(self, slot: int, states: RequestStates) -> None:
        """See Drafter."""
        self._begun[slot] = self._written[slot] = 0
        self._drafts[slot] = NO_DRAFT
        self._tables.num_blocks[slot] = 0

    def remove_request(self, slot: int) -> None:
        """See Drafter."""

    def observe(self, slots: np.ndarray, drafted: np.ndarray, accepted: np.ndarray) -> None:
        """See Drafter. The tokens say what was right."""

    @torch.inference_mode()
    def propose(self, slots: np.ndarray, states: RequestStates, room: np.ndarray) -> list[np.ndarray]:
        """See Drafter."""
        lengths = states.total_len[slots]
        room = np.minimum(room, self._longest - lengths)
        if not self._kv_caches or room.max(initial=0) <= 0:
            return [NO_DRAFT] * len(slots)
        self._map_blocks(slots)
        drafts = np.zeros((len(slots), int(room.max())), dtype=np.int32)
        starts = self._num_right(slots, lengths)
        for step in range(drafts.shape[1]):
            rows = np.flatnonzero(room > step)
            ends = lengths[rows] + step
            drafts[rows, step] = self._next(slots[rows], starts[rows], ends)
            # No one reads what is beyond the known tokens until drafts are placed there.
            states.token_ids[slots[rows], ends] = drafts[rows, step]
            starts[rows] = ends
        in_blocks = self._target_tables.num_blocks[slots] * self._tables.block_size
        self._begun[slots], self._written[slots] = lengths, np.minimum(starts, in_blocks)
        found = [draft[: max(count, 0)] for draft, count in zip(drafts, room.tolist(), strict=True)]
        for slot, draft in zip(slots.tolist(), found, strict=True):
            self._drafts[slot] = draft
        return found

    def _num_right(self, slots: np.ndarray, lengths: np.ndarray) -> np.ndarray:
        """int32 [R]: leading known tokens with keys and values, the last token apart."""
        right = self._written[slots]
        for row, (slot, length) in enumerate(zip(slots.tolist(), lengths.tolist(), strict=True)):
            begun, draft = int(self._begun[slot]), self._drafts[slot]
            known = self._states.token_ids[slot, begun : min(begun + len(draft), length)]
            wrong = np.flatnonzero(known != draft[: len(known)])
            right[row] = min(right[row], begun + (int(wrong[0]) if len(wrong) else len(known)))
        return np.minimum(right, lengths - 1)

    def _map_blocks(self, slots: np.ndarray) -> None:
        """Bring the slots' rows of the table up to date: the request's blocks, then the slot's own."""
        num_own = self._own_blocks_a_slot
        counts = self._target_tables.num_blocks[slots]
        for slot, count in zip(slots.tolist(), counts.tolist(), strict=True):
            if self._tables.num_blocks[slot] != count + num_own:
                first = self._first_own_block + slot * num_own
                blocks = self._target_tables.table[slot, :count].tolist()
                self._tables.set_row(slot, [*blocks, *range(first, first + num_own)])
        self._tables.apply_staged_writes()

    def _next(self, slots: np.ndarray, starts: np.ndarray, ends: np.ndarray) -> np.ndarray:
        """int32 [R]: the most likely token after the requests' first `ends` tokens, of which those from `starts` on are
        computed, in steps of a size that the target has, too."""
        found = np.zeros(len(slots), dtype=np.int32)
        starts = starts.copy()
        while len(rows := np.flatnonzero(starts < ends)):
            counts = ends[rows] - starts[rows]
            counts = np.minimum(counts, np.maximum(self._max_tokens - (np.cumsum(counts) - counts), 0))
            rows, counts = rows[counts > 0], counts[counts > 0]
            order = np.argsort(counts > 1, kind="stable")  # attention runs single tokens apart from the others
            rows, counts = rows[order], counts[order]
            starts[rows] += counts
            token_ids = self._forward(slots[rows], counts, starts[rows])
            is_done = starts[rows] == ends[rows]
            found[rows[is_done]] = token_ids[is_done]
        return found

    def _forward(self, slots: np.ndarray, counts: np.ndarray, ends: np.ndarray) -> np.ndarray:
        """int32 [R]: the most likely token after `ends` tokens, of which the last `counts` are computed here."""
        batch = self._batch(slots, counts, ends)
        last = batch.query_start_loc_np[1:].astype(np.int64) - 1
        if self._recorded is not None and self._recorded.takes(batch):
            hidden = self._recorded(batch)
        else:
            inputs = batch.to_device(self._states)
            hidden = self.model(inputs.input_ids, inputs.positions, self._kv_caches, inputs.attn, inputs.hidden_rows)
        if len(hidden) > len(slots):
            hidden = hidden.index_select(0, upload(last, self._device))
        logits = self.model.compute_logits(hidden)
        return self._vocab.most_likely(logits)[0].cpu().numpy()

    def _batch(self, slots: np.ndarray, counts: np.ndarray, ends: np.ndarray) -> InputBatch:
        """A step of `counts` tokens of each request, up to `ends`, both int32 [R], single tokens first."""
        starts = np.zeros(len(slots) + 1, dtype=np.int32)
        np.cumsum(counts, out=starts[1:])
        token_slots = np.repeat(slots, counts)
        positions = np.arange(starts[-1], dtype=np.int64) + np.repeat(ends - counts - starts[:-1], counts)
        num_decodes = int((counts == 1).sum())
        return InputBatch(
            req_ids=[""] * len(slots),
            idx_mapping_np=slots,
            num_scheduled_np=counts,
            seq_lens_np=ends.astype(np.int32),
            query_start_loc_np=starts,
            token_slots_np=token_slots,
            positions_np=positions,
            slot_mapping_np=self._tables.slot_mapping(token_slots, positions),
            input_ids_np=self._states.token_ids[token_slots, positions],
            max_query_len=int(counts.max()),
            max_seq_len=int(ends.max()),
            num_decodes=num_decodes,
            block_tables=(self._tables,),
            sampling_rows_np=np.arange(len(slots)),
            silent_rows_np=np.zeros(0, dtype=np.int64),
            hidden_rows_np=np.arange(starts[-1], dtype=np.int64),
            expanded_np=None if num_decodes == len(slots) else (np.arange(len(slots)), counts - 1),
        )
