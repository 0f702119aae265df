"""A processor that knows only what it is told, and follows updates by the letter of the interface."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from vllm import SamplingParams
from vllm.v1.sample.logits_processor import BatchUpdate, LogitsProcessor, MoveDirectionality


@dataclass
class Entry:
    params: SamplingParams
    prompt: list[int]
    output: list[int]


def follow(entries: dict[int, Entry], update: BatchUpdate | None) -> None:
    """Bring `entries` (by index) up to date. Every operation must make sense: nothing may be removed, moved or
    replaced that is not there, and no index may be left open."""
    if update is None:
        return
    gone = {index: entries.pop(index) for index in update.removed}
    assert len(gone) == len(update.removed)
    for index, params, prompt, output in update.added:
        assert index not in update.removed, "an index that is taken again is no removed one"
        entries[index] = Entry(params, prompt, output)
    for a, b, direction in update.moved:
        if direction is MoveDirectionality.SWAP:
            entries[a], entries[b] = entries[b], entries[a]
        else:
            assert b in update.removed and b not in entries, "a move fills what was left open"
            entries[b] = entries.pop(a)
    assert sorted(entries) == list(range(update.batch_size))
    assert update.removed or update.added or update.moved, "no news is None"


class MirrorProcessor(LogitsProcessor):
    """Changes nothing. Tests look at `entries` and at the logits of the last step."""

    last: MirrorProcessor

    def __init__(self, vllm_config, device, is_pin_memory):
        self.entries: dict[int, Entry] = {}
        self.updates: list[BatchUpdate | None] = []
        self.logits = torch.empty(0)
        MirrorProcessor.last = self

    def is_argmax_invariant(self):
        return False

    def update_state(self, batch_update):
        self.updates.append(batch_update)
        follow(self.entries, batch_update)

    def apply(self, logits):
        self.logits = logits.clone()
        return logits
