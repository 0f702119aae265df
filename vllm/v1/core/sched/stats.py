"""Counts of a scheduler."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass
class SchedulerStats:
    """Counts of the scheduler between two steps."""

    num_running: int
    num_waiting: int
    kv_cache_usage: float  # share of blocks owned, in [0, 1]
    num_prefix_queried_tokens: int
    num_prefix_hit_tokens: int
    num_preemptions: int
    num_swapped_out_blocks: int = 0  # copied to the host's memory since the start
    num_swapped_in_blocks: int = 0  # and back
    host_cache_usage: float = 0.0  # share of the host's blocks that hold content, in [0, 1]
    num_stored_blocks: int = 0  # written to the store on disk since the start
    num_loaded_blocks: int = 0  # and brought from there
    num_external_queried_tokens: int = 0  # prompt tokens looked up there
    num_external_hit_tokens: int = 0  # and those that were read
    num_preparing: int = 0  # requests that wait in no queue, as for their grammar
    running_adapters: tuple[str, ...] = ()  # names of LoRA adapters with running requests
    waiting_adapters: tuple[str, ...] = ()  # and with waiting ones
    num_drafts: int = 0  # since the start, times that tokens drafted for a request were verified
    num_draft_tokens: int = 0  # of those, all tokens
    num_accepted_tokens: int = 0  # and the right ones
    num_accepted_tokens_per_pos: list[int] = field(default_factory=list)  # these by their place in the draft
