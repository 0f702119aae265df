"""Drafts of a smaller model with the same vocabulary."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from vllm.config import ModelConfig, VllmConfig
from vllm.distributed.parallel_state import get_tp_group
from vllm.layers.state import state_layers
from vllm.loader import get_model
from vllm.ops.recording import can_record
from vllm.v1.features.drafts.draft_cache import DraftCache, take_tokens
from vllm.v1.worker.gpu.buffer_utils import upload
from vllm.v1.worker.gpu.replay.recorded_decode import RecordedDecode
from vllm.v1.worker.gpu.sample.vocab_parallel import vocab_of
from vllm.v1.worker.gpu.states import BlockTables, RequestStates

NO_DRAFT = np.zeros(0, dtype=np.int32)


class DraftModelDrafter:
    """Drafts greedily. What the prefix cache holds was computed by the target alone, so a request's first draft takes
    all its tokens."""

    def __init__(self, config: VllmConfig, states: RequestStates, tables: BlockTables) -> None:
        """Loads this rank's share of the draft. `tables`: see DraftCache. ValueError: the draft has recurrent
        states."""
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
        self._longest = min(self._config.max_model_len, config.model_config.max_model_len)
        self.cache = DraftCache(self.model, self._config, speculative.num_speculative_tokens, states, tables)
        max_num_reqs = states.max_num_reqs
        self._records = not config.model_config.enforce_eager and self._group.world_size == 1
        self._recorded: RecordedDecode | None = None
        self._begun = np.zeros(max_num_reqs, dtype=np.int32)  # [S], the tokens that the last draft followed
        self._written = np.zeros(max_num_reqs, dtype=np.int32)  # [S], tokens with keys and values, its own included
        self._drafts = [NO_DRAFT] * max_num_reqs

    @property
    def num_own_blocks(self) -> int:
        """Blocks of the draft's cache beyond the target's."""
        return self.cache.num_own_blocks

    @property
    def block_bytes(self) -> int:
        """The bytes of the draft's keys and values in a block."""
        return self.cache.block_bytes

    def allocate(self, num_blocks: int) -> None:
        """Allocate the draft's cache, beside a target's of `num_blocks`; 0: free it."""
        self._recorded = None
        self.cache.allocate(num_blocks)
        if num_blocks and self._records and can_record(self.cache.tables.tensor):
            parts = self.model, self.cache.kv_caches, self._states, self.cache.tables
            self._recorded = RecordedDecode(*parts, self._states.max_num_reqs)

    def add_request(self, slot: int, states: RequestStates) -> None:
        """See Drafter."""
        self._begun[slot] = self._written[slot] = 0
        self._drafts[slot] = NO_DRAFT
        self.cache.add_request(slot)

    def remove_request(self, slot: int) -> None:
        """See Drafter."""

    def observe(self, slots: np.ndarray, drafted: np.ndarray, accepted: np.ndarray) -> None:
        """See Drafter. The tokens say what was right."""

    @torch.inference_mode()
    def propose(self, slots: np.ndarray, states: RequestStates, room: np.ndarray) -> list[np.ndarray]:
        """See Drafter."""
        lengths = states.total_len[slots]
        room = np.minimum(room, self._longest - lengths)
        if not self.cache.kv_caches or room.max(initial=0) <= 0:
            return [NO_DRAFT] * len(slots)
        self.cache.map_blocks(slots)
        drafts = np.zeros((len(slots), int(room.max())), dtype=np.int32)
        starts = self._num_right(slots, lengths)
        for step in range(drafts.shape[1]):
            rows = np.flatnonzero(room > step)
            ends = lengths[rows] + step
            drafts[rows, step] = self._next(slots[rows], starts[rows], ends)
            # No one reads what is beyond the known tokens until drafts are placed there.
            states.token_ids[slots[rows], ends] = drafts[rows, step]
            starts[rows] = ends
        in_blocks = self._target_tables.num_blocks[slots] * self.cache.block_size
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

    def _next(self, slots: np.ndarray, starts: np.ndarray, ends: np.ndarray) -> np.ndarray:
        """int32 [R]: the most likely token after the requests' first `ends` tokens, of which those from `starts` on are
        computed, in steps of a size that the target has, too."""
        found = np.zeros(len(slots), dtype=np.int32)
        starts = starts.copy()
        while len((taken := take_tokens(starts, ends, self._max_tokens))[0]):
            rows, counts = taken
            starts[rows] += counts
            token_ids = self._forward(slots[rows], counts, starts[rows])
            is_done = starts[rows] == ends[rows]
            found[rows[is_done]] = token_ids[is_done]
        return found

    def _forward(self, slots: np.ndarray, counts: np.ndarray, ends: np.ndarray) -> np.ndarray:
        """int32 [R]: the most likely token after `ends` tokens, of which the last `counts` are computed here."""
        batch = self.cache.batch(slots, counts, ends)
        last = batch.query_start_loc_np[1:].astype(np.int64) - 1
        if self._recorded is not None and self._recorded.takes(batch):
            hidden = self._recorded(batch)
        else:
            inputs = batch.to_device(self._states)
            caches = self.cache.kv_caches
            hidden = self.model(inputs.input_ids, inputs.positions, caches, inputs.attn, inputs.hidden_rows)
        if len(hidden) > len(slots):
            hidden = hidden.index_select(0, upload(last, self._device))
        logits = self.model.compute_logits(hidden)
        return self._vocab.most_likely(logits)[0].cpu().numpy()
