"""Step state: one step's batch as an index mapping into the slots, and the tensors that the model reads."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import NamedTuple

import numpy as np
from torch import Tensor

from vllm.attention.backend import AttentionMetadata, HostStep, WholeBlock
from vllm.v1.core.sched.output import SchedulerOutput, SharedTokens
from vllm.v1.worker.gpu.buffer_utils import upload_all
from vllm.v1.worker.gpu.sample.prompt_logprob import PromptLogprobsState, PromptRows
from vllm.v1.worker.gpu.states import UNKNOWN, BlockTables, RequestStates


@dataclass
class PromptBatch:
    """The part of a step that reads prompts."""

    computed: PromptRows  # sources are rows of the step's hidden states
    cached: PromptRows  # sources are KV cache slots, where hidden states of cached prefixes are kept
    kept_rows: np.ndarray  # int64 [N], rows of the step's hidden states that are kept for later requests
    kept_slots: np.ndarray  # int64 [N], the KV cache slots of their tokens
    cached_hidden: Tensor | None = None  # [KV cache slots, H], what `cached` reads

    def parts(self, hidden: Tensor) -> Iterator[tuple[Tensor, PromptRows]]:
        """The rows to read, with their hidden states: first those of cached prefixes, then those that the step has
        computed, of which `hidden` are the final ones."""
        for source, rows in ((self.cached_hidden, self.cached), (hidden, self.computed)):
            if len(rows.slots):
                assert source is not None, "a cached prefix without the cache"
                yield source, rows


@dataclass
class InputBatch:
    """R requests, T tokens, M rows of final hidden states, L logits rows (the requests whose known tokens all have KV
    after this step, and that need a token or readings then)."""

    req_ids: list[str]
    idx_mapping_np: np.ndarray  # int64 [R], row -> slot
    num_scheduled_np: np.ndarray  # int32 [R]
    seq_lens_np: np.ndarray  # int32 [R], tokens with KV after the step
    query_start_loc_np: np.ndarray  # int32 [R + 1]
    token_slots_np: np.ndarray  # int64 [T], the slot of each token's request
    positions_np: np.ndarray  # int64 [T]
    slot_mappings_np: Sequence[np.ndarray]  # int64 [T] each, KV cache slots in every KV group
    input_ids_np: np.ndarray  # int32 [T], UNKNOWN where only the device has the token
    max_query_len: int
    max_seq_len: int
    num_decodes: int  # the first requests, which compute one token each; the others compute more
    block_tables: Sequence[BlockTables]  # of every KV group
    sampling_rows_np: np.ndarray  # int64 [L], batch row of each logits row
    silent_rows_np: np.ndarray  # int64, batch rows that are complete, too, but need no logits
    hidden_rows_np: np.ndarray  # int64 [M], increasing: tokens whose final hidden state is needed
    logits_rows_np: np.ndarray | None = None  # int64 [L], rows of the hidden states; None = all
    prompts: PromptBatch | None = None  # None: no request reads its prompt
    # Tokens whose keys and values are written a second time, and the KV cache slots for that, both int64 [S].
    shared_np: tuple[np.ndarray, np.ndarray] | None = None
    is_changed: bool = False  # whether layers compute something else for some request
    can_record_change: bool = False  # whether that can be recorded
    state_slots_np: np.ndarray | None = None  # int64 [R], rows of recurrent states; None: the slots
    # int64 [N], batch rows of the requests that have logits rows, and int32 [N], their tentative tokens: each has one
    # logits row more than these, its last. None: no tokens are tentative.
    expanded_np: tuple[np.ndarray, np.ndarray] | None = None
    whole_blocks: Sequence[WholeBlock] = ()  # tokens that see each other
    whole_in_windows_only: bool = False
    shown_positions_np: np.ndarray | None = None  # int64 [T], those that the model is given; None: the tokens' own

    @property
    def model_positions_np(self) -> np.ndarray:
        """int64 [T], the positions that the model is given."""
        return self.positions_np if self.shown_positions_np is None else self.shown_positions_np

    @property
    def is_decode(self) -> bool:
        """Whether each request computes one token of its own, and its final hidden state is needed."""
        return self.max_query_len == 1 and self._needs_all_hidden

    @property
    def is_expanded_decode(self) -> bool:
        """Whether requests compute tentative tokens, and all final hidden states are needed."""
        return self.expanded_np is not None and self._needs_all_hidden

    @property
    def _needs_all_hidden(self) -> bool:
        return self.shared_np is None and len(self.hidden_rows_np) == len(self.input_ids_np)

    @property
    def num_computed_np(self) -> np.ndarray:
        """int32 [R], tokens with KV before the step."""
        return self.seq_lens_np - self.num_scheduled_np

    @property
    def origins_np(self) -> np.ndarray:
        """int32 [R]: a request's token at position p is the step's token `origin + p`."""
        return self.query_start_loc_np[:-1] - self.num_computed_np

    def need_hidden(self, tokens: np.ndarray) -> None:
        """Let the final hidden states of the step's tokens of these numbers, int64, be computed, too."""
        kept = self.hidden_rows_np
        rows = np.union1d(kept, tokens)
        if len(rows) == len(kept):
            return
        moved = np.searchsorted(rows, kept)
        self.hidden_rows_np = rows
        self.logits_rows_np = moved if self.logits_rows_np is None else moved[self.logits_rows_np]
        if self.prompts is not None:
            computed = self.prompts.computed
            self.prompts.computed = computed._replace(sources=moved[computed.sources])
            self.prompts.kept_rows = moved[self.prompts.kept_rows]

    def to_device(self, states: RequestStates) -> ModelInputs:
        wide = [self.model_positions_np, self.idx_mapping_np, self.hidden_rows_np, *self.slot_mappings_np]
        narrow = [self.input_ids_np, self.query_start_loc_np, self.seq_lens_np]
        is_unknown = states.last_sampled is not None and (self.input_ids_np == UNKNOWN).any()
        if is_unknown:
            wide.append(self.token_slots_np)
        tensors = upload_all(wide + narrow, states.device)
        positions, slots, hidden_rows, *slot_mappings = tensors[: len(wide)]
        input_ids, query_start_loc, seq_lens = tensors[len(wide) :]
        if is_unknown:
            input_ids = states.known(input_ids, slot_mappings.pop())
        tables = [table.rows(slots, self.max_seq_len) for table in self.block_tables]
        max_decode_len = int(self.seq_lens_np[: self.num_decodes].max(initial=0))
        lengths = seq_lens, self.max_query_len, self.max_seq_len, self.num_decodes, max_decode_len
        attn = AttentionMetadata(slot_mappings[0], tables[0], query_start_loc, *lengths, state_slots=slots)
        if self.shared_np is not None:
            tokens, other_slots = upload_all(list(self.shared_np), states.device)
            attn.shared = tokens, other_slots
        if self.state_slots_np is not None:
            (attn.state_slots,) = upload_all([self.state_slots_np], states.device)
        attn.whole_blocks, attn.whole_in_windows_only = self.whole_blocks, self.whole_in_windows_only
        host = [
            HostStep(self.query_start_loc_np, self.seq_lens_np, self.idx_mapping_np, table.table)
            for table in self.block_tables
        ]
        attn.host = host[0]
        attn.groups = tuple(
            replace(attn, slot_mapping=slot_mappings[index], block_table=tables[index], host=host[index], group=index)
            for index in range(1, len(tables))
        )
        return ModelInputs(input_ids, positions, attn, hidden_rows)


class ModelInputs(NamedTuple):
    """A batch on the device: T tokens, M rows of final hidden states."""

    input_ids: Tensor  # int32 [T]
    positions: Tensor  # int64 [T]
    attn: AttentionMetadata
    hidden_rows: Tensor  # int64 [M]


def build_input_batch(
    step: SchedulerOutput,
    states: RequestStates,
    block_tables: Sequence[BlockTables],
    prompt_logprobs: PromptLogprobsState,
) -> InputBatch:
    """Gather a step's inputs from the slots, vectorised over the step: nothing is built row by row."""
    req_ids = list(step.num_scheduled_tokens)
    is_read = not prompt_logprobs.is_idle
    if len(req_ids) == step.total_num_scheduled_tokens and not is_read and not step.shared_tokens:
        return _build_decodes(req_ids, states, block_tables)
    counts = np.fromiter(step.num_scheduled_tokens.values(), dtype=np.int32, count=len(req_ids))
    num_decodes = int((counts == 1).sum())
    if 0 < num_decodes < len(req_ids):
        # These come first: attention runs them apart from the others.
        order = np.argsort(counts > 1, kind="stable")
        req_ids, counts = [req_ids[row] for row in order.tolist()], counts[order]
    slots = np.fromiter(map(states.req_id_to_slot.__getitem__, req_ids), dtype=np.int64, count=len(req_ids))
    query_start_loc = np.zeros(len(slots) + 1, dtype=np.int32)
    np.cumsum(counts, out=query_start_loc[1:])
    computed = states.num_computed_tokens[slots]
    seq_lens = computed + counts
    token_slots = np.repeat(slots, counts)
    # Position = tokens already computed + index within the request's share of this step.
    positions = np.arange(query_start_loc[-1], dtype=np.int64) + np.repeat(computed - query_start_loc[:-1], counts)
    num_tentative = states.take_tentative(slots)
    complete, reads_next = seq_lens == states.total_len[slots] + num_tentative, states.reads_next[slots]
    sampling_rows = np.flatnonzero(complete & reads_next)
    expanded, hidden_rows = None, query_start_loc[1:][sampling_rows].astype(np.int64) - 1
    if isinstance(num_tentative, np.ndarray):
        expanded = sampling_rows, num_tentative[sampling_rows]
        sampling_rows, hidden_rows = _expand(*expanded, hidden_rows)
    slot_mappings = [table.slot_mapping(token_slots, positions) for table in block_tables]
    batch = InputBatch(
        req_ids=req_ids,
        idx_mapping_np=slots,
        num_scheduled_np=counts,
        seq_lens_np=seq_lens,
        query_start_loc_np=query_start_loc,
        token_slots_np=token_slots,
        positions_np=positions,
        slot_mappings_np=slot_mappings,
        input_ids_np=states.token_ids[token_slots, positions],
        max_query_len=int(counts.max(initial=0)),
        max_seq_len=int(seq_lens.max(initial=0)),
        num_decodes=num_decodes,
        block_tables=block_tables,
        sampling_rows_np=sampling_rows,
        silent_rows_np=np.flatnonzero(complete & ~reads_next),
        hidden_rows_np=hidden_rows,
        expanded_np=expanded,
    )
    if is_read:
        _add_readings(batch, prompt_logprobs, block_tables[0])
    if step.shared_tokens:
        batch.shared_np = _shared(step.shared_tokens, batch, states, block_tables[0])
    return batch


def _expand(rows: np.ndarray, num_tentative: np.ndarray, last: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The batch row and the token, both int64 [L], of each logits row; `last`: the last tokens of batch `rows`."""
    counts = num_tentative.astype(np.int64) + 1
    ends = np.cumsum(counts)
    before_last = np.repeat(ends, counts) - 1 - np.arange(ends[-1] if len(ends) else 0)
    return np.repeat(rows, counts), np.repeat(last, counts) - before_last


@lru_cache(maxsize=256)
def _single_tokens(num_reqs: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Arrays of requests with one token each: counts int32 [R], query_start_loc int32 [R + 1], rows int64 [R]; not to
    be written to."""
    return np.ones(num_reqs, np.int32), np.arange(num_reqs + 1, dtype=np.int32), np.arange(num_reqs)


def _build_decodes(req_ids: list[str], states: RequestStates, tables: Sequence[BlockTables]) -> InputBatch:
    """build_input_batch where each request computes one token and none reads its prompt: fewer operations, as a step
    of one request takes as long for these as for a tenth of its products."""
    counts, query_start_loc, rows = _single_tokens(len(req_ids))
    slots = np.fromiter(map(states.req_id_to_slot.__getitem__, req_ids), dtype=np.int64, count=len(req_ids))
    computed = states.num_computed_tokens[slots]
    seq_lens, positions = computed + counts, computed.astype(np.int64)
    complete, reads_next = seq_lens == states.total_len[slots], states.reads_next[slots]
    is_sampled = complete & reads_next
    all_sampled = is_sampled.all()
    slot_mappings = [table.slot_mapping(slots, positions) for table in tables]
    sampling_rows = rows if all_sampled else np.flatnonzero(is_sampled)
    return InputBatch(
        req_ids=req_ids,
        idx_mapping_np=slots,
        num_scheduled_np=counts,
        seq_lens_np=seq_lens,
        query_start_loc_np=query_start_loc,
        token_slots_np=slots,
        positions_np=positions,
        slot_mappings_np=slot_mappings,
        input_ids_np=states.token_ids[slots, computed],
        max_query_len=1,
        max_seq_len=int(seq_lens.max()),
        num_decodes=len(req_ids),
        block_tables=tables,
        sampling_rows_np=sampling_rows,
        silent_rows_np=rows[:0] if all_sampled else np.flatnonzero(complete & ~reads_next),
        hidden_rows_np=sampling_rows,
    )


def _add_readings(batch: InputBatch, prompt_logprobs: PromptLogprobsState, block_table: BlockTables) -> None:
    """Add the prompt positions that the step reads, and the rows of hidden states for them."""
    kept = prompt_logprobs.keeps_hidden(batch.token_slots_np, batch.positions_np)
    needed = kept.copy()
    needed[batch.hidden_rows_np] = True
    row_of_token = np.cumsum(needed) - 1
    batch.logits_rows_np, batch.hidden_rows_np = row_of_token[batch.hidden_rows_np], np.flatnonzero(needed)
    slots, computed = batch.idx_mapping_np, batch.num_computed_np
    # The prefix cache has computed positions only of requests in their first step.
    index, positions = prompt_logprobs.take_rows(slots, np.zeros_like(computed), computed)
    cached = PromptRows(slots[index], positions, block_table.slot_mapping(slots[index], positions))
    index, positions = prompt_logprobs.take_rows(slots, computed, batch.seq_lens_np)
    computed_rows = PromptRows(slots[index], positions, row_of_token[batch.origins_np[index] + positions])
    batch.prompts = PromptBatch(computed_rows, cached, row_of_token[kept], batch.slot_mappings_np[0][kept])


def _shared(
    shared_tokens: Sequence[SharedTokens], batch: InputBatch, states: RequestStates, block_table: BlockTables
) -> tuple[np.ndarray, np.ndarray]:
    """The slots that a step writes a second time: its tokens and their other slots, both int64 [S]."""
    row_of = {req_id: row for row, req_id in enumerate(batch.req_ids)}
    origins = batch.origins_np
    counts = [each.num_tokens for each in shared_tokens]
    positions = np.concatenate([np.arange(each.start, each.start + each.num_tokens) for each in shared_tokens])
    owners = np.repeat([origins[row_of[each.owner]] for each in shared_tokens], counts)
    sharers = np.repeat([states.req_id_to_slot[each.sharer] for each in shared_tokens], counts)
    return owners + positions, block_table.slot_mapping(sharers, positions)
