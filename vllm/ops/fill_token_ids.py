"""Copy each row's requested token ids from their slot's list into a step's table of columns."""

from __future__ import annotations

import torch
from torch import Tensor

from vllm.ops._dispatch import dispatched


@dispatched
def fill_logprob_token_ids(
    columns: Tensor,
    first_column: int,
    expanded_idx_mapping: Tensor,
    token_ids: Tensor,
    list_idx: Tensor,
    num_token_ids: Tensor,
) -> Tensor:
    """Fill `columns[:, first_column:]` in place with each row's ids, padded with 0; returns the rows' numbers of ids,
    int32 [L]. Earlier columns stay as they are. `columns` is int32 [L, first_column + M], the last dimension
    contiguous, and M at least every row's count; `expanded_idx_mapping`, int32 or int64 [L], gives each row's slot.
    `token_ids`, int32 [lists, width], are the stored lists; by slot, both int32 [S], `list_idx` is the list that it
    uses, and `num_token_ids` how many ids of that list count."""
    slots = expanded_idx_mapping.to(torch.int64)
    counts = num_token_ids[slots]
    target = columns[:, first_column:].zero_()
    width = min(target.shape[1], token_ids.shape[1])
    lists = token_ids[list_idx[slots].to(torch.int64), :width]
    column = torch.arange(width, dtype=torch.int32, device=columns.device)
    target[:, :width] = lists.masked_fill(column >= counts[:, None], 0)
    return counts
