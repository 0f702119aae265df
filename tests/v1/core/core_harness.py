"""A model made of nothing: it writes token ids into blocks as a model writes keys, and checks its reads. What a prompt
position says is read from the final hidden states of the step, or from those kept for a cached prefix."""

from __future__ import annotations

import hashlib
import random
from collections import Counter
from collections.abc import Iterable

import numpy as np
from guests import guest_of

from vllm import SamplingParams
from vllm.config import CacheConfig, SchedulerConfig
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.features.build import cache_guests
from vllm.v1.features.drafts.scheduler import Drafts, NextDrafts, StepDrafts
from vllm.v1.features.forced_runs.scheduler import ForcedTokens
from vllm.v1.features.swap.scheduler import OffloadPool, StepSwaps, Swaps
from vllm.v1.messages import EngineCoreOutput
from vllm.v1.outputs import NO_TOKEN, FollowingTokens, LogprobsRows, ModelRunnerOutput, Parts
from vllm.v1.request import Request

BLOCK_SIZE = 4
MAX_DRAFTS = 6
VOCAB = 7  # small, so that prompts share prefixes by chance


def make_scheduler(
    num_blocks=64,
    max_num_seqs=4,
    budget=16,
    policy="fcfs",
    chunked=True,
    caching=True,
    max_model_len=48,
    idle=None,
    host_blocks=0,
    parts=True,
    snapshots=None,
    interval=BLOCK_SIZE,
    windows=(None,),
) -> Scheduler:
    return Scheduler(
        SchedulerConfig(max_num_seqs, budget, chunked, policy),
        CacheConfig(
            BLOCK_SIZE,
            caching,
            num_blocks,
            shares_parts_of_blocks=parts,
            max_idle_tokens=idle,
            num_host_blocks=host_blocks,
            group_windows=windows,
            num_states=None if snapshots is None else max_num_seqs,
            num_snapshots=snapshots or 0,
            snapshot_interval=interval,
        ),
        max_model_len,
        lambda scheduler: (Drafts(scheduler), ForcedTokens(scheduler), *cache_guests(scheduler)),
    )


def make_request(request_id: str, prompt: list[int], max_tokens=4, priority=0, eos=(), salt=None, **params) -> Request:
    return Request(
        request_id,
        prompt,
        SamplingParams(max_tokens=max_tokens, **params),
        frozenset(eos),
        arrival_time=float(request_id.strip("r") or 0),
        priority=priority,
        cache_salt=salt,
    )


def host_of(scheduler: Scheduler) -> OffloadPool | None:
    swaps = guest_of(scheduler, Swaps)
    return None if swaps is None else swaps.host


def swaps_of(step: SchedulerOutput) -> StepSwaps:
    return step.parts.of(StepSwaps) or StepSwaps()


def next_token(tokens: list[int]) -> int:
    """The model's token after `tokens`: a pure function of them, as any model's answer."""
    return hashlib.sha256(bytes(tokens)).digest()[0] % VOCAB


class FakeRunner:
    """Holds slots as the real runner does. Cell (block, offset) holds the history that a key depends on. With
    `drafts`, a source of randomness, it drafts up to MAX_DRAFTS tokens, of which some are wrong."""

    def __init__(self, max_num_seqs: int, drafts: random.Random | None = None) -> None:
        self.max_num_seqs = max_num_seqs
        self.drafts = drafts
        self.cells: dict[tuple[int, int], tuple] = {}
        self.hidden: dict[tuple[int, int], tuple] = {}
        self.host_cells: dict[tuple[int, int], tuple] = {}
        self.keeps: dict[str, range] = {}  # prompt positions whose hidden state is kept
        self.unread: dict[str, range] = {}  # prompt positions that are still to be read
        self.max_tokens: dict[str, int] = {}
        self.num_cached_rows = 0
        self.tokens: dict[str, list[int]] = {}
        self.blocks: dict[str, list[int]] = {}
        self.computed: dict[str, int] = {}
        self.salts: dict[str, str | None] = {}  # set by tests that use them

    def execute(self, step: SchedulerOutput) -> ModelRunnerOutput:
        self._swap(step)
        self._update(step)
        guessed = step.parts.of(StepDrafts) or {}
        for req_id, drafts in guessed.items():
            assert drafts and self.computed[req_id] + step.num_scheduled_tokens[req_id] == len(
                self.tokens[req_id]
            ) + len(drafts)
            self.tokens[req_id] += drafts
        for req_id, count in step.num_scheduled_tokens.items():
            # Writing comes first for all requests: within a layer, attention reads after every write.
            for position in range(self.computed[req_id], self.computed[req_id] + count):
                cell, key = self._cell(req_id, position), self._key(req_id, position)
                self.cells[cell] = key
                self.hidden[cell] = key if position in self.keeps[req_id] else ("none",)
        for owner, sharer, start, count in step.shared_tokens:
            for position in range(start, start + count):
                assert position in range(self.computed[owner], self.computed[owner] + step.num_scheduled_tokens[owner])
                assert position < self.computed[sharer]
                cell = self._cell(sharer, position)
                self.cells[cell], self.hidden[cell] = self._key(owner, position), ("none",)
        prompts = {req_id: self._read_prompt(req_id, count) for req_id, count in step.num_scheduled_tokens.items()}
        req_ids, sampled, following = [], [], {}
        for req_id, count in step.num_scheduled_tokens.items():
            end = self.computed[req_id] + count
            for position in range(end):
                found = self.cells.get(self._cell(req_id, position))
                assert found == self._key(req_id, position), f"{req_id} reads something else at {position}"
            self.computed[req_id] = end
            if end == len(self.tokens[req_id]):
                first, *later = self._draw(req_id, guessed.get(req_id, []))
                req_ids.append(req_id)
                sampled.append(first)
                if later:
                    following[req_id] = FollowingTokens(later, [], [])
        return ModelRunnerOutput(
            req_ids,
            np.array(sampled, np.int32),
            [None] * len(req_ids),
            prompt_logprobs={req_id: rows for req_id, rows in prompts.items() if rows},
            following=following,
            parts=Parts({NextDrafts: NextDrafts({each: drafts for each in req_ids if (drafts := self._guess(each))})}),
        )

    def _draw(self, req_id: str, drafts: list[int]) -> list[int]:
        """Draw what follows the known tokens: one token, and one for each right draft before it."""
        tokens = self.tokens[req_id]
        if not self.max_tokens[req_id]:
            return [NO_TOKEN]
        del tokens[len(tokens) - len(drafts) :]
        drawn = [next_token(tokens)]
        while len(drawn) <= len(drafts) and drawn[-1] == drafts[len(drawn) - 1]:
            drawn.append(next_token(tokens + drawn))
        tokens += drawn
        if drafts:
            self.computed[req_id] = len(tokens) - 1
        return drawn

    def _guess(self, req_id: str) -> list[int]:
        if self.drafts is None or not self.max_tokens[req_id]:
            return []
        tokens = list(self.tokens[req_id])
        for _ in range(self.drafts.randint(0, MAX_DRAFTS)):
            tokens.append(next_token(tokens) if self.drafts.random() < 0.8 else self.drafts.randrange(VOCAB))
        return tokens[len(self.tokens[req_id]) :]

    def _read_prompt(self, req_id: str, count: int) -> list[LogprobsRows]:
        """Read the prompt positions that are there after this step, each once and in order."""
        computed = self.computed[req_id]
        unread = self.unread[req_id]
        end = min(computed + count, unread.stop)
        if unread.start >= end:
            return []
        for position in range(unread.start, min(computed, end)):
            found = self.hidden.get(self._cell(req_id, position))
            assert found == self._key(req_id, position), f"{req_id} reads another hidden state at {position}"
            self.num_cached_rows += 1
        self.unread[req_id] = range(end, unread.stop)
        return [LogprobsRows(None, slice(0, end - unread.start), 0)]

    def spoil(self, blocks: Iterable[int]) -> None:
        """The contents of these blocks are wrong from now on."""
        for block in blocks:
            for offset in range(BLOCK_SIZE):
                self.cells[block, offset] = self.hidden[block, offset] = ("wrong",)

    def _swap(self, step: SchedulerOutput) -> None:
        swaps = swaps_of(step)
        # Backwards, because the scheduler counts on no order among the copies of one direction.
        for block, host_block in reversed(swaps.out):
            for offset in range(BLOCK_SIZE):
                self.host_cells[host_block, offset] = self.cells.get((block, offset), ("nothing",))
        # All are read before any is written.
        contents = [
            [self.cells.get((block, offset), ("nothing",)) for offset in range(BLOCK_SIZE)]
            for block, _ in step.block_copies
        ]
        for (_, copy), content in zip(step.block_copies, contents, strict=True):
            for offset, cell in enumerate(content):
                self.cells[copy, offset], self.hidden[copy, offset] = cell, ("none",)
        for host_block, block in reversed(swaps.back):
            for offset in range(BLOCK_SIZE):
                self.cells[block, offset] = self.host_cells[host_block, offset]
                self.hidden[block, offset] = ("none",)

    def _key(self, req_id: str, position: int) -> tuple:
        return (self.salts.get(req_id), *self.tokens[req_id][: position + 1])

    def _update(self, step: SchedulerOutput) -> None:
        for req_id in (*step.finished_req_ids, *step.preempted_req_ids):
            for table in (self.tokens, self.blocks, self.computed, self.keeps, self.unread, self.max_tokens):
                table.pop(req_id, None)
        for new in step.scheduled_new_reqs:
            assert new.req_id not in self.tokens, "a request got a second slot"
            self.tokens[new.req_id] = list(new.prefill_token_ids)
            self.blocks[new.req_id] = list(new.block_ids[0])
            self.computed[new.req_id] = new.num_computed_tokens
            self.max_tokens[new.req_id] = new.sampling_params.max_tokens
            start, end = new.next_prompt_row, new.num_prompt_tokens
            self.keeps[new.req_id] = range(0) if start is None else range(start, end)
            self.unread[new.req_id] = range(0) if start is None else range(start, end - 1)
        assert len(self.tokens) <= self.max_num_seqs, "more requests than slots"
        cached = step.scheduled_cached_reqs
        for req_id, added, computed in zip(
            cached.req_ids, cached.new_block_ids, cached.num_computed_tokens, strict=True
        ):
            self.blocks[req_id] += added[0] if added else []
            assert self.computed[req_id] == computed
        assert [*cached.req_ids, *(new.req_id for new in step.scheduled_new_reqs)] == list(step.num_scheduled_tokens)

    def _cell(self, req_id: str, position: int) -> tuple[int, int]:
        return self.blocks[req_id][position // BLOCK_SIZE], position % BLOCK_SIZE


def run_step(scheduler: Scheduler, runner: FakeRunner, seen: Counter | None = None) -> list[EngineCoreOutput]:
    computed = {request.request_id: request.num_computed_tokens for request in scheduler.running}
    content = set(scheduler.kv.pool._block_of)
    step = scheduler.schedule()
    check_invariants(scheduler, step)
    if seen is not None:
        _count(scheduler, step, content, computed, seen)
    outputs = scheduler.update_from_output(step, runner.execute(step))
    check_invariants(scheduler)
    return outputs


def _count(
    scheduler: Scheduler, step: SchedulerOutput, content: set[bytes], computed: dict[str, int], seen: Counter
) -> None:
    """Which of the hard cases the step met."""
    order = [*computed]
    swaps = swaps_of(step)
    brought_back = {block for _, block in swaps.back}
    seen["preemptions"] += len(step.preempted_req_ids)
    for req_id in step.preempted_req_ids:
        # Somebody who came later goes on: this one had had its turn when it lost its place.
        later = order[order.index(req_id) + 1 :]
        seen["preemptions of scheduled requests"] += any(other in step.num_scheduled_tokens for other in later)
    for new in step.scheduled_new_reqs:
        request = scheduler.requests[new.req_id]
        hits = new.num_computed_tokens // BLOCK_SIZE
        seen["prefix hits"] += hits
        seen["shared within a step"] += any(content_hash not in content for content_hash in request.block_hashes[:hits])
        seen["resumed with cached blocks"] += bool(request.num_preemptions and hits)
        seen["resumed from the host"] += bool(request.num_preemptions and brought_back & set(new.block_ids[0]))
        seen["split prompts"] += request.num_computed_tokens < request.num_tokens
    for req_id, drafts in (step.parts.of(StepDrafts) or {}).items():
        seen["drafts"] += 1
        seen["drafts over a border"] += scheduler.requests[req_id].num_computed_tokens % BLOCK_SIZE < len(drafts)
    seen["copied parts"] += len(step.block_copies)
    seen["parts shared within a step"] += len(step.shared_tokens)
    # The copy's source was handed out in this very step.
    handed_out = {block for new in step.scheduled_new_reqs for block in new.block_ids[0]}
    seen["copies of what is given up"] += sum(block in handed_out for block, _ in step.block_copies)
    seen["swapped out"] += len(swaps.out)
    seen["swapped in"] += len(swaps.back)
    seen["out and in within a step"] += len({host for _, host in swaps.out} & {host for host, _ in swaps.back})
    seen["evictions"] += len(content - set(scheduler.kv.pool._block_of))


def check_invariants(scheduler: Scheduler, step: SchedulerOutput | None = None) -> None:
    """No block is leaked, owned by more or fewer than its count says, or free while referenced."""
    pool = scheduler.kv.pool
    owners = Counter(block for owned in scheduler.kv.owned.values() for block in owned.groups[0])
    assert {block: count for block, count in enumerate(pool.ref_counts) if count} == owners
    free = [*pool._uncached, *pool._evictable]
    assert len(free) == len(set(free))
    assert set(free) == set(range(pool.num_blocks)) - set(owners)
    assert {content: block for block, content in pool._hash_of.items()} == pool._block_of
    assert set(pool._evictable) <= set(pool._hash_of)
    assert not set(pool._uncached) & set(pool._hash_of)
    assert pool._with_hidden <= set(pool._hash_of)
    assert set(pool.partial_blocks._groups) == set(pool.partial_blocks._group_of.values())
    for owned in scheduler.kv.owned.values():
        assert len(owned.groups[0]) == len(set(owned.groups[0]))
    host = host_of(scheduler)
    if host is not None:
        assert sorted([*host._uncached, *host._block_of.values()]) == list(range(host.num_blocks))
        assert not host._of_this_step
    assert set(scheduler.kv.owned) == {request.request_id for request in scheduler.running}
    assert len(scheduler.running) <= scheduler.config.max_num_seqs
    assert len(scheduler.running) + len(scheduler.waiting) == len(scheduler.requests)
    for request in scheduler.running:
        held = len(scheduler.kv.blocks_of(request.request_id)[0]) * BLOCK_SIZE
        # Blocks for drafts that were wrong are kept for the tokens to come.
        most = request.num_computed_tokens + (MAX_DRAFTS if scheduler.stats().num_drafts else 0)
        assert request.num_computed_tokens <= held < most + BLOCK_SIZE
    # Requests that wait for a snapshot, or for their adapter's turn, let others pass.
    if scheduler.config.policy == "fcfs" and not scheduler._shares and not scheduler._on_next:
        line = [request.arrival_index for request in scheduler.running]
        line += sorted(number for lane in scheduler.waiting._lanes.values() for number in lane.members)
        assert line == sorted(line), "somebody jumped the queue"
    if step is not None:
        assert sum(step.num_scheduled_tokens.values()) == step.total_num_scheduled_tokens
        assert step.total_num_scheduled_tokens <= scheduler.config.max_num_batched_tokens
        assert all(count > 0 for count in step.num_scheduled_tokens.values())
        assert not (step.preempted_req_ids and step.scheduled_new_reqs)
        for req_id, drafts in (step.parts.of(StepDrafts) or {}).items():
            request = scheduler.requests[req_id]
            assert len(drafts) < min(step.num_scheduled_tokens[req_id], request.max_tokens - request.num_output_tokens)
            assert not request.end_token_ids & set(drafts)
        copies = [block for _, block in step.block_copies] + [block for _, block in swaps_of(step).back]
        for targets in ([host for _, host in swaps_of(step).out], copies):
            assert len(targets) == len(set(targets)), "two copies to one block"
        if step.total_num_scheduled_tokens < scheduler.config.max_num_batched_tokens:
            assert [request.request_id for request in scheduler.running] == list(step.num_scheduled_tokens)


def expected_output(prompt: list[int], max_tokens: int, max_model_len: int, eos=()) -> list[int]:
    """A request's output when it is alone in the world."""
    tokens = list(prompt)
    while len(tokens) - len(prompt) < max_tokens and len(tokens) < max_model_len:
        tokens.append(next_token(tokens))
        if tokens[-1] in eos:
            break
    return tokens[len(prompt) :]
