"""Step state: one step's batch as an index mapping into the slots, and the tensors that the model reads."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch

from vllm.attention.backend import AttentionMetadata
from vllm.v1.core.sched.output import SharedTokens
from vllm.v1.worker.gpu.block_table import BlockTables
from vllm.v1.worker.gpu.buffer_utils import upload_all
from vllm.v1.worker.gpu.sample.prompt_logprob import PromptLogprobsState, PromptRows
from vllm.v1.worker.gpu.states import UNKNOWN, RequestStates


@dataclass
class PromptBatch:
    """What a step does for requests that read their prompts."""

    computed: PromptRows  # sources are rows of the step's hidden states
    cached: PromptRows  # sources are KV cache slots, where hidden states of cached prefixes are kept
    kept_rows: np.ndarray  # int64 [N], rows of the step's hidden states that are kept for later requests
    kept_slots: np.ndarray  # int64 [N], the KV cache slots of their tokens


@dataclass
class InputBatch:
    """R requests, T tokens, M rows of final hidden states, L logits rows (the requests whose known tokens all have KV
    after this step, and that want a token or readings then)."""

    req_ids: list[str]
    idx_mapping_np: np.ndarray  # int64 [R], row -> slot
    num_scheduled_np: np.ndarray  # int32 [R]
    input_ids_np: np.ndarray  # int32 [T], UNKNOWN where the device alone has the token
    token_slots_np: np.ndarray  # int64 [T], the slot of each token's request
    positions_np: np.ndarray  # int64 [T]
    slot_mapping_np: np.ndarray  # int64 [T], KV cache slots
    block_table_np: np.ndarray  # int32 [R, blocks of the longest request]
    query_start_loc_np: np.ndarray  # int32 [R + 1]
    seq_lens_np: np.ndarray  # int32 [R]
    hidden_rows_np: np.ndarray  # int64 [M], increasing: tokens whose final hidden state is wanted
    logits_rows_np: np.ndarray | None  # int64 [L], rows of the hidden states; None = all
    sampling_rows_np: np.ndarray  # int64 [L], batch row of each logits row
    silent_rows_np: np.ndarray  # int64, batch rows that are complete, too, but want no logits
    prompts: PromptBatch | None  # None: no request reads its prompt
    max_query_len: int
    max_seq_len: int
    # Tokens whose keys and values are written once more, and the KV cache slots of that, both int64 [S]; None: none.
    shared_np: tuple[np.ndarray, np.ndarray] | None = None

    @property
    def is_decode(self) -> bool:
        """Whether each request computes one token of its own, and its final hidden state is wanted."""
        is_short = self.max_query_len == 1 and self.shared_np is None
        return is_short and len(self.hidden_rows_np) == len(self.input_ids_np)

    def to_device(self, states: RequestStates) -> ModelInputs:
        """What the model reads, in one upload."""
        wide = [self.positions_np, self.slot_mapping_np, self.hidden_rows_np]
        narrow = [self.input_ids_np, self.query_start_loc_np, self.seq_lens_np, self.block_table_np]
        is_unknown = states.last_sampled is not None and (self.input_ids_np == UNKNOWN).any()
        if is_unknown:
            wide.append(self.token_slots_np)
        tensors = upload_all(wide + narrow, states.device)
        positions, slot_mapping, hidden_rows, *token_slots = tensors[: len(wide)]
        input_ids, query_start_loc, seq_lens, block_table = tensors[len(wide) :]
        shared: tuple[torch.Tensor, torch.Tensor] | None = None
        if self.shared_np is not None:
            tokens, other_slots = upload_all(list(self.shared_np), states.device)
            shared = tokens, other_slots
        return ModelInputs(
            states.known(input_ids, *token_slots) if is_unknown else input_ids,
            positions,
            AttentionMetadata(
                slot_mapping=slot_mapping,
                block_table=block_table,
                query_start_loc=query_start_loc,
                seq_lens=seq_lens,
                max_query_len=self.max_query_len,
                max_seq_len=self.max_seq_len,
                shared=shared,
            ),
            hidden_rows,
        )


class ModelInputs(NamedTuple):
    """A batch on the device: T tokens, M rows of final hidden states."""

    input_ids: torch.Tensor  # int32 [T]
    positions: torch.Tensor  # int64 [T]
    attn: AttentionMetadata
    hidden_rows: torch.Tensor  # int64 [M]


class _Layout(NamedTuple):
    """Where a step's tokens belong: R requests, T tokens."""

    slots: np.ndarray  # int64 [R]
    computed: np.ndarray  # int32 [R], tokens with KV before the step
    seq_lens: np.ndarray  # int32 [R], and after it
    query_start_loc: np.ndarray  # int32 [R + 1]
    token_slots: np.ndarray  # int64 [T]
    positions: np.ndarray  # int64 [T]
    slot_mapping: np.ndarray  # int64 [T], KV cache slots


def build_input_batch(
    num_scheduled_tokens: dict[str, int],
    states: RequestStates,
    block_tables: BlockTables,
    prompt_logprobs: PromptLogprobsState,
    shared_tokens: Sequence[SharedTokens] = (),
) -> InputBatch:
    """Gather a step's inputs from the slots. Everything is vectorised over the step; nothing is built row by row."""
    req_ids = list(num_scheduled_tokens)
    slots = np.fromiter(map(states.req_id_to_slot.__getitem__, req_ids), dtype=np.int64, count=len(req_ids))
    counts = np.fromiter(num_scheduled_tokens.values(), dtype=np.int32, count=len(req_ids))
    layout = _lay_out(slots, counts, states, block_tables)

    complete = layout.seq_lens == states.total_len[slots]
    sampling_rows = np.flatnonzero(complete & states.reads_next[slots])
    hidden_rows = layout.query_start_loc[1:][sampling_rows].astype(np.int64) - 1
    logits_rows: np.ndarray | None = None
    prompts: PromptBatch | None = None
    if not prompt_logprobs.is_idle:
        kept = prompt_logprobs.keeps_hidden(layout.token_slots, layout.positions)
        wanted = kept.copy()
        wanted[hidden_rows] = True
        row_of_token = np.cumsum(wanted) - 1
        logits_rows, hidden_rows = row_of_token[hidden_rows], np.flatnonzero(wanted)
        prompts = PromptBatch(
            cached=_cached_rows(prompt_logprobs, block_tables, layout),
            computed=_computed_rows(prompt_logprobs, layout, row_of_token),
            kept_rows=row_of_token[kept],
            kept_slots=layout.slot_mapping[kept],
        )

    max_seq_len = int(layout.seq_lens.max(initial=0))
    return InputBatch(
        req_ids=req_ids,
        idx_mapping_np=slots,
        num_scheduled_np=counts,
        input_ids_np=states.token_ids[layout.token_slots, layout.positions],
        token_slots_np=layout.token_slots,
        positions_np=layout.positions,
        slot_mapping_np=layout.slot_mapping,
        block_table_np=block_tables.gather(slots, max_seq_len),
        query_start_loc_np=layout.query_start_loc,
        seq_lens_np=layout.seq_lens,
        hidden_rows_np=hidden_rows,
        logits_rows_np=logits_rows,
        sampling_rows_np=sampling_rows,
        silent_rows_np=np.flatnonzero(complete & ~states.reads_next[slots]),
        prompts=prompts,
        max_query_len=int(counts.max(initial=0)),
        max_seq_len=max_seq_len,
        shared_np=_shared(shared_tokens, req_ids, states, block_tables, layout) if shared_tokens else None,
    )


def _shared(
    shared_tokens: Sequence[SharedTokens],
    req_ids: list[str],
    states: RequestStates,
    block_tables: BlockTables,
    layout: _Layout,
) -> tuple[np.ndarray, np.ndarray]:
    """What a step writes once more: its tokens and their other slots, both int64 [S]."""
    row_of = {req_id: row for row, req_id in enumerate(req_ids)}
    # The step's index of each request's position 0, were it there.
    origins = layout.query_start_loc[:-1] - layout.computed
    counts = [each.num_tokens for each in shared_tokens]
    positions = np.concatenate([np.arange(each.start, each.start + each.num_tokens) for each in shared_tokens])
    owners = np.repeat([origins[row_of[each.owner]] for each in shared_tokens], counts)
    sharers = np.repeat([states.req_id_to_slot[each.sharer] for each in shared_tokens], counts)
    return owners + positions, block_tables.slot_mapping(sharers, positions)


def _lay_out(slots: np.ndarray, counts: np.ndarray, states: RequestStates, block_tables: BlockTables) -> _Layout:
    query_start_loc = np.zeros(len(slots) + 1, dtype=np.int32)
    np.cumsum(counts, out=query_start_loc[1:])
    computed = states.num_computed_tokens[slots]
    token_slots = np.repeat(slots, counts)
    # Position = tokens already computed + index within the request's share of this step.
    positions = np.arange(query_start_loc[-1], dtype=np.int64) + np.repeat(computed - query_start_loc[:-1], counts)
    slot_mapping = block_tables.slot_mapping(token_slots, positions)
    return _Layout(slots, computed, computed + counts, query_start_loc, token_slots, positions, slot_mapping)


def _cached_rows(prompt_logprobs: PromptLogprobsState, block_tables: BlockTables, layout: _Layout) -> PromptRows:
    """Positions that the prefix cache has computed; a request has such only in its first step."""
    index, positions = prompt_logprobs.take_rows(layout.slots, np.zeros_like(layout.computed), layout.computed)
    slots = layout.slots[index]
    return PromptRows(slots, positions, block_tables.slot_mapping(slots, positions))


def _computed_rows(prompt_logprobs: PromptLogprobsState, layout: _Layout, row_of_token: np.ndarray) -> PromptRows:
    """Positions that this step computes."""
    index, positions = prompt_logprobs.take_rows(layout.slots, layout.computed, layout.seq_lens)
    # The step's index of each request's position 0, were it there.
    origins = layout.query_start_loc[:-1] - layout.computed
    return PromptRows(layout.slots[index], positions, row_of_token[origins[index] + positions])
