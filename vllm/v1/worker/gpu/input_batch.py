"""Step state: one step's batch as an index mapping into the slots, and the tensors that the model reads."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch

from vllm.v1.attention.metadata import AttentionMetadata
from vllm.v1.worker.gpu.block_table import BlockTables
from vllm.v1.worker.gpu.buffer_utils import upload
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
    input_ids: torch.Tensor  # int32 [T]
    positions: torch.Tensor  # int64 [T]
    attn: AttentionMetadata
    hidden_rows: torch.Tensor  # int64 [M], increasing: tokens whose final hidden state is wanted
    logits_rows: torch.Tensor | None  # int64 [L], rows of the hidden states; None = all
    sampling_rows_np: np.ndarray  # int64 [L], batch row of each logits row
    silent_rows_np: np.ndarray  # int64, batch rows that are complete, too, but want no logits
    prompts: PromptBatch | None  # None: no request reads its prompt


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
    device: torch.device,
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

    def to_device(array: np.ndarray) -> torch.Tensor:
        return upload(array, device)

    input_ids_np = states.token_ids[layout.token_slots, layout.positions]
    input_ids = to_device(input_ids_np)
    if states.last_sampled is not None and (input_ids_np == UNKNOWN).any():
        input_ids = states.known(input_ids, to_device(layout.token_slots))
    max_seq_len = int(layout.seq_lens.max(initial=0))
    return InputBatch(
        req_ids=req_ids,
        idx_mapping_np=slots,
        num_scheduled_np=counts,
        input_ids=input_ids,
        positions=to_device(layout.positions),
        attn=AttentionMetadata(
            slot_mapping=to_device(layout.slot_mapping),
            block_table=to_device(block_tables.gather(slots, max_seq_len)),
            query_start_loc=to_device(layout.query_start_loc),
            seq_lens=to_device(layout.seq_lens),
            max_query_len=int(counts.max(initial=0)),
            max_seq_len=max_seq_len,
        ),
        hidden_rows=to_device(hidden_rows),
        logits_rows=None if logits_rows is None else to_device(logits_rows),
        sampling_rows_np=sampling_rows,
        silent_rows_np=np.flatnonzero(complete & ~states.reads_next[slots]),
        prompts=prompts,
    )


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
