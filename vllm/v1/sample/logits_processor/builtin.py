"""A helper for processors that keep one entry a request."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from vllm.sampling_params import SamplingParams
from vllm.v1.sample.logits_processor.interface import BatchUpdate, MoveDirectionality

T = TypeVar("T")


def process_dict_updates(
    req_entries: dict[int, T],
    batch_update: BatchUpdate | None,
    new_state: Callable[[SamplingParams, list[int] | None, list[int]], T | None],
) -> bool:
    """Apply a batch update (None: nothing to do) to a dict of index -> entry, in place; whether anything in it changed.
    `new_state` gives an added request's entry from its parameters, prompt and output token ids; None = no entry."""
    if batch_update is None:
        return False
    changed = False
    for index in batch_update.removed:
        changed |= req_entries.pop(index, None) is not None
    for index, params, prompt_ids, output_ids in batch_update.added:
        changed |= _place(req_entries, index, new_state(params, prompt_ids, output_ids))
    for a, b, direction in batch_update.moved:
        from_a, from_b = req_entries.pop(a, None), req_entries.pop(b, None)
        changed |= _place(req_entries, b, from_a)
        if direction is MoveDirectionality.SWAP:
            changed |= _place(req_entries, a, from_b)
        changed |= from_b is not None
    return changed


def _place(entries: dict[int, T], index: int, entry: T | None) -> bool:
    """Replace the entry at the index; returns whether that changed anything."""
    before = entries.pop(index, None)
    if entry is not None:
        entries[index] = entry
    return entry is not None or before is not None
