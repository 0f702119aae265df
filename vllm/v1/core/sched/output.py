"""The scheduler's output: the workers' input for a step."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from vllm.pooling_params import PoolingParams
from vllm.sampling_params import SamplingParams
from vllm.v1.outputs import Parts


@dataclass
class NewRequestData:
    """A request that gets a slot in this step: newly admitted, or resumed after a preemption."""

    req_id: str
    prefill_token_ids: list[int]  # the prompt, and the tokens generated before a preemption
    num_prompt_tokens: int
    sampling_params: SamplingParams
    # The blocks owned so far in each KV group, cached prefix first; 0 where a group needs none.
    block_ids: tuple[list[int], ...]
    num_computed_tokens: int  # tokens whose KV is in those blocks, or is written there by this step
    next_prompt_row: int | None = None  # first prompt position whose logits are still to be read, if any
    pooling_params: PoolingParams | None = None  # of a pooling model's request


@dataclass
class CachedRequestData:
    """Requests that have a slot already, in batch order."""

    req_ids: list[str] = field(default_factory=list)
    # The blocks appended in this step in each KV group, in all as many; often none: ().
    new_block_ids: list[tuple[list[int], ...]] = field(default_factory=list)
    num_computed_tokens: list[int] = field(default_factory=list)


class SharedTokens(NamedTuple):
    """Tokens that two requests have at the same positions, which a step computes once."""

    owner: str  # id of the request that computes them
    sharer: str  # id of the other, into whose block they are written, too
    start: int  # their first position
    num_tokens: int


@dataclass
class SchedulerOutput:
    """The work of one step."""

    scheduled_new_reqs: list[NewRequestData]
    scheduled_cached_reqs: CachedRequestData
    num_scheduled_tokens: dict[str, int]  # request id -> tokens in this step; its order is the batch's
    total_num_scheduled_tokens: int
    finished_req_ids: list[str]  # ended since the last step: their slots are free
    preempted_req_ids: list[str]  # lost slot and blocks in this step; they come back as NewRequestData
    # Copies at the start of the step: (block, its copy), the latter distinct. All are read before one is written.
    block_copies: list[tuple[int, int]] = field(default_factory=list)
    # Distinct blocks that guests fill with cached content, after these copies and before the forward pass.
    brought_blocks: list[int] = field(default_factory=list)
    shared_tokens: list[SharedTokens] = field(default_factory=list)
    parts: Parts = field(default_factory=Parts)  # of guests

    def begun_at(self) -> Iterator[tuple[str, int]]:
        """Each request of the step, and how many of its tokens were computed before."""
        cached = self.scheduled_cached_reqs
        yield from zip(cached.req_ids, cached.num_computed_tokens, strict=True)
        for new in self.scheduled_new_reqs:
            yield new.req_id, new.num_computed_tokens


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
