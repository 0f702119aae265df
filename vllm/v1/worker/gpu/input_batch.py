"""Step state: one step's batch as an index mapping into the slots, and the tensors that the model reads."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from vllm.v1.attention.metadata import AttentionMetadata
from vllm.v1.worker.gpu.block_table import BlockTables
from vllm.v1.worker.gpu.states import RequestStates


@dataclass
class InputBatch:
    """R requests, T tokens, L logits rows (the requests whose known tokens all have KV after this step)."""

    req_ids: list[str]
    idx_mapping_np: np.ndarray  # int64 [R], row -> slot
    num_scheduled_np: np.ndarray  # int32 [R]
    input_ids: torch.Tensor  # int32 [T]
    positions: torch.Tensor  # int64 [T]
    attn: AttentionMetadata
    logits_rows: torch.Tensor  # int64 [L], token index of each logits row
    sampling_rows_np: np.ndarray  # int64 [L], batch row of each logits row


def build_input_batch(
    num_scheduled_tokens: dict[str, int],
    states: RequestStates,
    block_tables: BlockTables,
    device: torch.device,
) -> InputBatch:
    """Gather a step's inputs from the slots. Everything is vectorised over the step; nothing is built row by row."""
    req_ids = list(num_scheduled_tokens)
    slots = np.fromiter(map(states.req_id_to_slot.__getitem__, req_ids), dtype=np.int64, count=len(req_ids))
    counts = np.fromiter(num_scheduled_tokens.values(), dtype=np.int32, count=len(req_ids))
    query_start_loc = np.zeros(len(req_ids) + 1, dtype=np.int32)
    np.cumsum(counts, out=query_start_loc[1:])

    computed = states.num_computed_tokens[slots]
    seq_lens = computed + counts
    token_slots = np.repeat(slots, counts)
    # Position = tokens already computed + index within the request's share of this step.
    positions = np.arange(query_start_loc[-1], dtype=np.int64) + np.repeat(computed - query_start_loc[:-1], counts)
    max_seq_len = int(seq_lens.max(initial=0))
    sampling_rows = np.flatnonzero(seq_lens == states.total_len[slots])
    logits_rows = query_start_loc[1:][sampling_rows].astype(np.int64) - 1

    def to_device(array: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(array).to(device, non_blocking=True)

    return InputBatch(
        req_ids=req_ids,
        idx_mapping_np=slots,
        num_scheduled_np=counts,
        input_ids=to_device(states.token_ids[token_slots, positions]),
        positions=to_device(positions),
        attn=AttentionMetadata(
            slot_mapping=to_device(block_tables.slot_mapping(token_slots, positions)),
            block_table=to_device(block_tables.gather(slots, max_seq_len)),
            query_start_loc=to_device(query_start_loc),
            seq_lens=to_device(seq_lens),
            max_query_len=int(counts.max(initial=0)),
            max_seq_len=max_seq_len,
        ),
        logits_rows=to_device(logits_rows),
        sampling_rows_np=sampling_rows,
    )
