"""Recurrent states in the scheduler: a prefix is cached where its blocks are and a snapshot of the state after it."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from vllm.v1.core.block_pool import extend_block_hashes
from vllm.v1.core.guests import SchedulerGuest
from vllm.v1.core.kv_cache_groups import state_key
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.features.states.snapshot_pool import SnapshotPool
from vllm.v1.request import Request

_LEAST_SHARE = 16  # of the interval: tokens that a further snapshot has to save


@dataclass
class StepStates:
    """The states that a step copies."""

    loads: list[tuple[int, str]] = field(default_factory=list)  # (snapshot, request), before its forward pass
    saves: list[tuple[str, int]] = field(default_factory=list)  # (request, snapshot) after it, the latter distinct
    brought: list[int] = field(default_factory=list)  # snapshots that another guest fills before these loads


class Snapshots(SchedulerGuest):
    """Decides which states are saved, and what begins with them.

    A running request's state is not counted here: it has a row of its own as long as it runs. A state is saved at
    borders of blocks alone, where a step's share of a request ends; so `share` cuts that at the next border to be
    saved: at every `snapshot_interval` tokens, at the last border that a request with the same prompt can begin from,
    and where the prompts of waiting requests part from this one's, the latter two where that saves enough. A waiting
    request that a step makes a snapshot for is admitted in the next one (`awaits`), and so computes its suffix alone.
    """

    def __init__(self, scheduler: Any) -> None:
        config = scheduler.cache_config
        assert config.snapshot_interval is not None
        self.pool = SnapshotPool(config.num_snapshots)
        self._kv = scheduler.kv
        self._block_size, self._interval = config.block_size, config.snapshot_interval
        # How many waiting requests could begin with this content.
        self._num_waiting: Counter[bytes] = Counter()
        # By the id of a waiting request, what it is counted for, and its content number then.
        self._counted: dict[str, tuple[list[bytes], int]] = {}
        self._save_at: dict[str, int] = {}  # where the share of a request ends that is saved then
        self._last_saved: dict[str, int] = {}  # tokens of a running request at its last snapshot

    # -- requests -------------------------------------------------------------------------------------------------

    def waits(self, request: Request) -> None:
        if not request.sampling_params.skip_reading_prefix_cache:
            hashes = self._usable_hashes(request)
            self._counted[request.request_id] = hashes, request.content_number
            self._num_waiting.update(hashes)

    def ready(self, request: Request) -> str | None:
        counted = self._counted.get(request.request_id)
        if counted is not None and counted[1] != request.content_number:
            # Another guest has changed what computes it.
            self.admitted(request)
            self.waits(request)
        return None

    def admitted(self, request: Request) -> None:
        """It does not wait any more."""
        for key in self._counted.pop(request.request_id, ((), 0))[0]:
            self._num_waiting[key] -= 1
            if not self._num_waiting[key]:
                del self._num_waiting[key]

    def preempted(self, request: Request, step: SchedulerOutput) -> None:
        dropped = self.pool.drop_saved(request)
        if dropped:
            saves = _part(step).saves
            saves[:] = [(owner, snapshot) for owner, snapshot in saves if snapshot not in dropped]
        self._forget(request)

    def ended(self, request: Request) -> None:
        self.admitted(request)
        self._forget(request)

    def _forget(self, request: Request) -> None:
        for known in (self._last_saved, self._save_at):
            known.pop(request.request_id, None)

    def _usable_hashes(self, request: Request) -> list[bytes]:
        """The hashes of the blocks that a cached prefix may have: not the last token's."""
        return extend_block_hashes(request, self._block_size)[: (request.num_tokens - 1) // self._block_size]

    # -- prefixes -------------------------------------------------------------------------------------------------

    def longest_prefix(self, request: Request, hashes: list[bytes], count: int) -> int:
        while count and not self._has_state(hashes[count - 1]):
            count -= 1
        return count

    def _has_state(self, content_hash: bytes) -> bool:
        if self.pool.find(content_hash) is not None:
            return True
        return self._kv.is_held(state_key(content_hash)) and self.pool.can_place

    def awaits(self, request: Request, num_cached: int) -> bool:
        if request.sampling_params.skip_reading_prefix_cache:
            return False
        hashes = self._usable_hashes(request)
        for count in range(len(hashes), num_cached // self._block_size, -1):
            owner = self.pool.saver(hashes[count - 1])
            if owner is not None:
                return self._keeps_hidden_for(owner, request, count)
        return False

    def _keeps_hidden_for(self, owner: Request, request: Request, count: int) -> bool:
        """Whether the owner's first `count` blocks are of use for the prompt positions that the request is to read."""
        row = request.next_prompt_row
        if row is None or row >= count * self._block_size:
            return True
        first = owner.hidden_from
        return first is not None and first <= row // self._block_size * self._block_size

    def lost(self, key: bytes) -> None:
        # Without the block its end's state is of no use.
        self.pool.forget(key)

    def broken(self, request: Request, keys: list[bytes]) -> None:
        for content_hash in request.block_hashes:
            self.pool.forget(content_hash)

    def reset_cache(self) -> None:
        self.pool.reset()

    # -- steps ----------------------------------------------------------------------------------------------------

    def share(self, request: Request, begin: int, num_new: int) -> int:
        self._save_at.pop(request.request_id, None)
        hashes = extend_block_hashes(request, self._block_size)
        # A request that waits counts itself.
        own = 1 if request.request_id in self._counted else 0
        last = self._last_saved.get(request.request_id, begin)
        end_index = min((begin + num_new) // self._block_size, len(hashes))
        for index in range(begin // self._block_size, end_index):
            content_hash, end = hashes[index], (index + 1) * self._block_size
            if self.pool.find(content_hash) is not None or self.pool.saver(content_hash) is not None:
                last = end
            elif self._is_border(request, hashes, index, end - last, own):
                self._save_at[request.request_id] = end
                return end - begin
        return num_new

    def _is_border(self, request: Request, hashes: list[bytes], index: int, num_tokens: int, own: int) -> bool:
        """Whether the state after block `index` is to be saved, `num_tokens` after the last that was."""
        if (index + 1) * self._block_size % self._interval == 0:
            return True
        least = self._interval // _LEAST_SHARE
        num_waiting = self._num_waiting[hashes[index]] - own
        further = self._num_waiting[hashes[index + 1]] - own if index + 1 < len(hashes) else 0
        if num_waiting > max(further, 0) and num_waiting * num_tokens >= least:
            return True
        is_last = index + 1 == (request.num_prompt_tokens - 1) // self._block_size
        return is_last and num_tokens >= least

    def computes(self, request: Request, begin: int, end: int, step: SchedulerOutput) -> None:
        request_id = request.request_id
        if request_id not in self._last_saved:
            self._last_saved[request_id] = begin
            if begin:
                content_hash = request.block_hashes[begin // self._block_size - 1]
                # It may be evicted for a state that is saved after this one is loaded.
                snapshot = self.pool.find(content_hash)
                if snapshot is None:
                    snapshot = self.pool.place(content_hash)
                    self._kv.bring(state_key(content_hash), snapshot)
                    _part(step).brought.append(snapshot)
                self.pool.use(content_hash)
                _part(step).loads.append((snapshot, request_id))
        is_asked = self._save_at.pop(request_id, None) == end
        # The last token may be one that is not known yet.
        if end % self._block_size or end > len(request.token_ids) or not (is_asked or end % self._interval == 0):
            return
        content_hash = extend_block_hashes(request, self._block_size)[end // self._block_size - 1]
        saved = self.pool.save(content_hash, request)
        self._last_saved[request_id] = end
        if saved is not None:
            _part(step).saves.append((request_id, saved))

    def fill(self, step: SchedulerOutput) -> None:
        self.pool.end_step()

    def discarded(self, step: SchedulerOutput) -> None:
        if (part := step.parts.of(StepStates)) is not None:
            self.pool.forget_snapshots({*part.brought, *(snapshot for _, snapshot in part.saves)})


def _part(step: SchedulerOutput) -> StepStates:
    return step.parts.made(StepStates)
