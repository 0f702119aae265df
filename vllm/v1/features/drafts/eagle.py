"""Drafts of layers that take the target's hidden states: a checkpoint's MTP layers, an EAGLE head.

Entry p of a layer's cache is made of the hidden state at position p and of a later token: of layer i, counted from 0,
the one at p + 1 + i, and the hidden state is layer i - 1's, or the target's. So a request with N tokens has N - 1
entries, and the last ones of layer i need tokens that the layers before it draft. The last layer is applied again for
further tokens, at the next position: what it made of an entry stands for the hidden state that it was made for.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from vllm.attention.backend import AttentionMetadata
from vllm.config import ModelConfig, VllmConfig
from vllm.distributed.parallel_state import get_tp_group
from vllm.ops.recording import can_record
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.features.drafts.draft_cache import DraftCache, take_tokens
from vllm.v1.worker.gpu.buffer_utils import upload
from vllm.v1.worker.gpu.input_batch import InputBatch
from vllm.v1.worker.gpu.replay.recorded_decode import MAX_EXPANDED_ROWS, MAX_ROWS, RecordedDecode, streams_of
from vllm.v1.worker.gpu.sample.vocab_parallel import vocab_of
from vllm.v1.worker.gpu.states import NO_ID, BlockTables, KVCaches, RequestStates

NO_DRAFT = np.zeros(0, dtype=np.int32)
_UNKNOWN = -1


class EagleProposer:
    """Drafts greedily, with EAGLE heads and MTP layers alike. The target's hidden states are kept beside keys and
    values, block by block, so that entries are computed when a draft needs them: also those of cached prefixes, and
    after steps without drafts."""

    def __init__(
        self,
        config: VllmConfig,
        model: Any,
        model_config: ModelConfig,
        target: Any,
        states: RequestStates,
        tables: BlockTables,
        before_rows: Callable[[np.ndarray], object],
    ) -> None:
        """`model`: this rank's share of the layers, a Predictor or an EagleHead, of `model_config`. `tables`: see
        DraftCache. `before_rows` is called with the slots of rows that the target's embeddings or head take next."""
        speculative = config.speculative_config
        assert speculative is not None and speculative.num_speculative_tokens is not None
        self.model, self._target, self._states, self._target_tables = model, target, states, tables
        self._group, self._device = get_tp_group(), states.device
        self._vocab = vocab_of(model.vocab_size, self._group)
        self._max_tokens = config.scheduler_config.max_num_batched_tokens
        self._longest = config.model_config.max_model_len
        self.cache = DraftCache(self.model, model_config, speculative.num_speculative_tokens, states, tables)
        self._hidden_size, self._dtype = model.spec.hidden_size, getattr(torch, model_config.dtype)
        # [blocks * block size, H]: final hidden states of the target, and whether all layers' entries are there.
        self.hidden: Tensor | None = None
        self._is_final = np.zeros(0, dtype=bool)
        # [S]: leading entries that are there; _UNKNOWN: those of the cached prefix, which are as many tokens, may be.
        self._num_final = np.zeros(states.max_num_reqs, dtype=np.int32)
        self._num_cached = np.zeros(states.max_num_reqs, dtype=np.int32)
        # [S]: leading tokens whose hidden states are there.
        self._num_kept = np.zeros(states.max_num_reqs, dtype=np.int32)
        self._records = model.can_be_recorded and not config.model_config.enforce_eager and self._group.world_size == 1
        self._recorded: list[_RecordedLayer] = []
        self._packing_version = 0
        self._before_rows = before_rows

    @property
    def num_own_blocks(self) -> int:
        """Blocks of the layers' cache beyond the target's."""
        return self.cache.num_own_blocks

    @property
    def block_bytes(self) -> int:
        """The bytes of the layers' keys and values, and of the target's hidden states, in a block."""
        return self.cache.block_bytes + self.hidden_block_bytes

    @property
    def hidden_block_bytes(self) -> int:
        """The bytes of the target's hidden states in a block."""
        return self._hidden_size * self.cache.block_size * self._dtype.itemsize

    def allocate(self, num_blocks: int) -> None:
        """Allocate what is kept beside a target's cache of `num_blocks`; 0: free it."""
        self._recorded, self.hidden = [], None
        self.cache.allocate(num_blocks)
        num_slots = num_blocks * self.cache.block_size
        self._is_final = np.zeros(num_slots, dtype=bool)
        if not num_blocks:
            return
        # Rows that no step has written are read where entries are computed for nothing: they must be numbers.
        self.hidden = torch.zeros((num_slots, self._hidden_size), dtype=self._dtype, device=self._device)
        self._record()

    def kept_in_blocks(self) -> KVCaches:
        """The caches that are swapped with a block."""
        return [] if self.hidden is None else [(self.hidden.unflatten(0, (-1, self.cache.block_size)),)]

    def _record(self) -> None:
        """Begin to record layers anew: a recording holds addresses."""
        self._recorded = []
        if self._records and self.cache.kv_caches and can_record(self.cache.tables.tensor):
            parts = self.model, self.cache.kv_caches, self._states, self.cache.tables, self._hidden_size, self._dtype
            self._recorded = [_RecordedLayer(index, *parts) for index in range(self.model.num_layers)]

    def _check_weights(self) -> None:
        updater = self.model.weight_updater
        updater.complete()
        if updater.packing_version != self._packing_version:
            self._packing_version = updater.packing_version
            self._record()

    # -- what the target does -----------------------------------------------------------------------------------------

    def forget(self, step: SchedulerOutput) -> None:
        """Before a step that fills blocks from elsewhere: their entries were others'."""
        blocks = [*step.brought_blocks, *(copy for _, copy in step.block_copies)]
        if blocks and len(self._is_final):
            self._is_final.reshape(-1, self.cache.block_size)[blocks] = False

    def keep(self, batch: InputBatch, hidden: Tensor) -> None:
        """Keep what the layers take of a step's final hidden states [T, H] and of the target's streams; nothing before
        `allocate`, when steps only measure memory."""
        if self.hidden is None:
            return
        slots = batch.idx_mapping_np
        self._num_final[slots] = np.minimum(self._num_final[slots], batch.num_computed_np)
        self._num_kept[slots] = batch.seq_lens_np
        hidden = self.model.taken_of(hidden, streams_of(self._target))
        self._write(batch.slot_mappings_np[0], hidden)
        if batch.shared_np is not None:
            tokens, places = batch.shared_np
            self._write(places, hidden.index_select(0, upload(tokens, self._device)))

    def _write(self, cache_slots: np.ndarray, hidden: Tensor) -> None:
        assert self.hidden is not None
        self.hidden.index_copy_(0, upload(cache_slots, self._device), hidden)
        self._is_final[cache_slots] = False

    # -- drafts -------------------------------------------------------------------------------------------------------

    def add_request(self, slot: int, states: RequestStates) -> None:
        """See Drafter."""
        self._num_final[slot] = _UNKNOWN
        self._num_cached[slot] = self._num_kept[slot] = states.num_computed_tokens[slot]
        self.cache.add_request(slot)

    def remove_request(self, slot: int) -> None:
        """See Drafter."""

    def observe(self, slots: np.ndarray, drafted: np.ndarray, accepted: np.ndarray) -> None:
        """See Drafter. Hidden states of tokens that were wrong are written over."""

    @torch.inference_mode()
    def propose(self, slots: np.ndarray, states: RequestStates, room: np.ndarray) -> list[np.ndarray]:
        """See Drafter."""
        lengths = states.total_len[slots]
        room = np.minimum(room, self._longest - lengths)
        # The tokens of a grammar that follow without a choice have no hidden states yet.
        rows = np.flatnonzero((room > 0) & (self._num_kept[slots] >= lengths - 1))
        found = [NO_DRAFT] * len(slots)
        if self.hidden is None or not len(rows):
            return found
        self._check_weights()
        self.cache.map_blocks(slots[rows])
        drafts = self._drafts(slots[rows], lengths[rows] - 1, room[rows])
        for row, draft, count in zip(rows.tolist(), drafts, room[rows].tolist(), strict=True):
            found[row] = draft[:count]
        return found

    def _drafts(self, slots: np.ndarray, ends: np.ndarray, room: np.ndarray) -> np.ndarray:
        """int32 [R, K]: at least `room` tokens of each request with so many entries, both int32 [R]."""
        num_layers, most = self.model.num_layers, int(room.max())
        drafts = np.zeros((len(slots), max(num_layers, most)), dtype=np.int32)
        hidden = self._catch_up(slots, self._starts(slots, ends), ends, drafts)
        rows = np.arange(len(slots))
        for step in range(num_layers, most):
            stay = np.flatnonzero(room[rows] > step)
            hidden, rows = hidden.index_select(0, upload(stay, self._device)), rows[stay]
            last = ends[rows] + step - num_layers + 1
            batch = self.cache.batch(slots[rows], np.ones(len(rows), dtype=np.int32), last)
            hidden = self._layer(num_layers - 1, batch, drafts[rows, step - 1], hidden, None)
            drafts[rows, step] = self._most_likely(num_layers - 1, hidden, slots[rows])
        return drafts

    def _starts(self, slots: np.ndarray, ends: np.ndarray) -> np.ndarray:
        """int32 [R]: leading entries of those up to `ends` that need not be computed; the last one is."""
        for slot, end in zip(slots.tolist(), ends.tolist(), strict=True):
            if self._num_final[slot] == _UNKNOWN:
                # The last entry of a cached prefix is of whatever followed there.
                most = max(min(int(self._num_cached[slot]) - 1, end), 0)
                places = self._target_tables.slot_mapping(np.full(most, slot), np.arange(most))
                lacking = np.flatnonzero(~self._is_final[places])
                self._num_final[slot] = lacking[0] if len(lacking) else most
        return np.maximum(np.minimum(self._num_final[slots], ends - 1), 0)

    def _catch_up(self, slots: np.ndarray, starts: np.ndarray, ends: np.ndarray, drafts: np.ndarray) -> Tensor:
        """Compute the layers' entries from `starts` to `ends`, int32 [R], in steps of a size that the target has, too,
        and put each layer's token into its column of `drafts`, int32 [R, K]. Returns what the last layer made of the
        last entries, [R, H]."""
        assert self.hidden is not None
        num_layers = self.model.num_layers
        found = self.hidden.new_empty((len(slots), self._hidden_size))
        begun = starts.copy()
        while len((taken := take_tokens(starts, ends, self._max_tokens))[0]):
            rows, counts = taken
            starts[rows] += counts
            batch = self.cache.batch(slots[rows], counts, starts[rows])
            last = batch.query_start_loc_np[1:].astype(np.int64) - 1
            done = np.flatnonzero(starts[rows] == ends[rows])
            hidden = self.hidden.index_select(0, upload(batch.slot_mappings_np[0], self._device))
            for layer in range(num_layers):
                ids = self._tokens(batch.token_slots_np, batch.positions_np + 1 + layer)
                hidden = self._layer(layer, batch, ids, hidden, last if layer == num_layers - 1 else None)
                ended = hidden if len(hidden) == len(last) else hidden.index_select(0, upload(last, self._device))
                if len(done):
                    ended = ended.index_select(0, upload(done, self._device))
                    own = rows[done]
                    drafts[own, layer] = self._most_likely(layer, ended, slots[own])
                    self._place(slots[own], ends[own] + 1 + layer, drafts[own, layer])
            if len(done):
                found.index_copy_(0, upload(rows[done], self._device), ended)
        # The entries that were made of known tokens alone.
        self._num_final[slots] = np.maximum(ends - num_layers + 1, 0)
        for slot, start, end in zip(slots.tolist(), begun.tolist(), self._num_final[slots].tolist(), strict=True):
            positions = np.arange(start, end)
            self._is_final[self._target_tables.slot_mapping(np.full(len(positions), slot), positions)] = True
        return found

    def _tokens(self, slots: np.ndarray, positions: np.ndarray) -> np.ndarray:
        """int32 [T]: known and drafted tokens, 0 for embeddings; near the longest sequence's end, drafts that no one
        asks for."""
        ids = self._states.token_ids[slots, np.minimum(positions, self._longest)]
        return np.where(ids == NO_ID, 0, ids)

    def _place(self, slots: np.ndarray, positions: np.ndarray, token_ids: np.ndarray) -> None:
        """No one reads what is beyond the known tokens until drafts are placed there."""
        self._states.token_ids[slots, np.minimum(positions, self._longest)] = token_ids

    def _layer(self, layer: int, batch: InputBatch, token_ids: np.ndarray, hidden: Tensor, rows: Any) -> Tensor:
        """[T, H], or [L, H] of the tokens in `rows`, int64 [L]: what a layer makes of tokens, int32 [T], and of the
        hidden states before them, [T, H]."""
        inputs = batch.to_device(self._states)
        self._before_rows(batch.token_slots_np)
        embeddings = self.model.embed(self._target, upload(token_ids, self._device), inputs.positions + 1 + layer)
        stream = self.model.combine(layer, embeddings, hidden)
        if self._recorded and self._recorded[layer].takes(batch):
            hidden = self._recorded[layer](batch, stream)
            return hidden if rows is None else hidden.index_select(0, upload(rows, self._device))
        chosen = None if rows is None or len(rows) == len(token_ids) else upload(rows, self._device)
        return self.model(layer, stream, inputs.positions, self.cache.kv_caches[layer], inputs.attn, chosen)

    def _most_likely(self, layer: int, hidden: Tensor, slots: np.ndarray) -> np.ndarray:
        """int32 [R]"""
        self._before_rows(slots)
        found = self._vocab.most_likely(self.model.compute_logits(self._target, layer, hidden))[0]
        return self.model.target_ids(found).cpu().numpy()


class _RecordedLayer:
    """A layer's recorded steps, whose input is copied to a fixed address."""

    def __init__(
        self,
        index: int,
        predictor: Any,
        kv_caches: KVCaches,
        states: RequestStates,
        tables: BlockTables,
        hidden_size: int,
        dtype: torch.dtype,
    ) -> None:
        self._index, self._predictor = index, predictor
        most = max(min(states.max_num_reqs, MAX_ROWS), MAX_EXPANDED_ROWS)
        self._stream = torch.empty((most, hidden_size), dtype=dtype)
        self._steps = RecordedDecode(self._run, kv_caches, states, tables, states.max_num_reqs)

    def takes(self, batch: InputBatch) -> bool:
        """Whether `batch` can be replayed from a recording."""
        return self._steps.takes(batch)

    def __call__(self, batch: InputBatch, stream: Tensor) -> Tensor:
        """As Predictor.forward, of the batch's T tokens; valid until the next call."""
        self._stream[: len(stream)].copy_(stream)
        return self._steps(batch)

    def _run(self, ids: Tensor, positions: Tensor, kv_caches: KVCaches, attn: AttentionMetadata) -> Tensor:
        stream = self._stream[: len(ids)]
        hidden: Tensor = self._predictor(self._index, stream, positions, kv_caches[self._index], attn)
        return hidden
