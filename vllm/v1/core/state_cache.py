"""The KV cache manager of models with recurrent states: a prefix is cached where its blocks are and a snapshot of the
state after it."""

from __future__ import annotations

from collections import Counter

from vllm.config import CacheConfig
from vllm.v1.core.block_pool import extend_block_hashes
from vllm.v1.core.kv_cache_groups import GroupedKVCacheManager
from vllm.v1.core.kv_cache_manager import CachedPrefix
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.snapshot_pool import SnapshotPool
from vllm.v1.request import Request

_LEAST_SHARE = 16  # of the interval: tokens that a further snapshot has to save


class StateCacheManager(GroupedKVCacheManager):
    """As GroupedKVCacheManager, with a snapshot pool beside the block pool.

    A running request's state is not counted here: it has a row of its own as long as it runs. A state is saved at
    borders of blocks alone, where a step's share of a request ends; so `share` cuts that at the next border to be
    saved: at every `snapshot_interval` tokens, at the last border that a request with the same prompt can begin from,
    and where the prompts of waiting requests part from this one's, the latter two where that saves enough. A waiting
    request that a step makes a snapshot for is admitted in the next one (`awaits`), and so computes its suffix alone.
    """

    has_states = True
    cuts_shares = True

    def __init__(self, config: CacheConfig) -> None:
        super().__init__(config)
        self.snapshots = SnapshotPool(config.num_snapshots)
        assert config.snapshot_interval is not None
        self._interval = config.snapshot_interval
        self.snapshot_interval = self._interval if self.enable_caching else None
        # How many waiting requests could begin with this content.
        self._num_waiting: Counter[bytes] = Counter()
        self._counted: dict[str, list[bytes]] = {}
        self._save_at: dict[str, int] = {}  # where the share of a request ends that is saved then
        self._last_saved: dict[str, int] = {}  # tokens of a running request at its last snapshot

    def note_waiting(self, request: Request) -> None:
        if not request.sampling_params.skip_reading_prefix_cache:
            hashes = self._usable_hashes(request)
            self._counted[request.request_id] = hashes
            self._num_waiting.update(hashes)

    def note_not_waiting(self, request: Request) -> None:
        self._save_at.pop(request.request_id, None)
        for key in self._counted.pop(request.request_id, ()):
            self._num_waiting[key] -= 1
            if not self._num_waiting[key]:
                del self._num_waiting[key]

    def _usable_hashes(self, request: Request) -> list[bytes]:
        """Of the blocks that a cached prefix may have: not the last token's."""
        return extend_block_hashes(request, self.block_size)[: (request.num_tokens - 1) // self.block_size]

    def find_prefix(self, request: Request) -> CachedPrefix:
        if not self.enable_caching or request.sampling_params.skip_reading_prefix_cache:
            return CachedPrefix([])
        hashes = self._usable_hashes(request)
        count = len(hashes)
        while count:
            snapshot = self.snapshots.find(hashes[count - 1])
            if snapshot is not None and self._num_cached_blocks(hashes[:count], request.next_prompt_row) == count:
                return CachedPrefix([None] * count, count * self.block_size, snapshot=snapshot)
            count -= 1
        return CachedPrefix([])

    def awaits(self, request: Request, prefix: CachedPrefix) -> bool:
        if not self.enable_caching or request.sampling_params.skip_reading_prefix_cache:
            return False
        hashes = self._usable_hashes(request)
        for count in range(len(hashes), len(prefix.blocks), -1):
            owner = self.snapshots.saver(hashes[count - 1])
            if owner is not None:
                return self._keeps_hidden_for(owner, request, count)
        return False

    def _keeps_hidden_for(self, owner: Request, request: Request, count: int) -> bool:
        """Whether the owner's first `count` blocks are of use for the prompt positions that the request is to read."""
        row = request.next_prompt_row
        if row is None or row >= count * self.block_size:
            return True
        first = owner.hidden_from
        return first is not None and first <= row // self.block_size * self.block_size

    def share(self, request: Request, start: int, num_new_tokens: int) -> int:
        self._save_at.pop(request.request_id, None)
        if not self.enable_caching:
            return num_new_tokens
        hashes = extend_block_hashes(request, self.block_size)
        # A request that waits counts itself.
        own = 1 if request.request_id in self._counted else 0
        last = self._last_saved.get(request.request_id, start)
        end_index = min((start + num_new_tokens) // self.block_size, len(hashes))
        for index in range(start // self.block_size, end_index):
            content_hash, end = hashes[index], (index + 1) * self.block_size
            if self.snapshots.find(content_hash) is not None or self.snapshots.saver(content_hash) is not None:
                last = end
            elif self._is_border(request, hashes, index, end - last, own):
                self._save_at[request.request_id] = end
                return end - start
        return num_new_tokens

    def _is_border(self, request: Request, hashes: list[bytes], index: int, num_tokens: int, own: int) -> bool:
        """Whether the state after block `index` is to be saved, `num_tokens` after the last that was."""
        if (index + 1) * self.block_size % self._interval == 0:
            return True
        least = self._interval // _LEAST_SHARE
        num_waiting = self._num_waiting[hashes[index]] - own
        further = self._num_waiting[hashes[index + 1]] - own if index + 1 < len(hashes) else 0
        if num_waiting > max(further, 0) and num_waiting * num_tokens >= least:
            return True
        is_last = index + 1 == (request.num_prompt_tokens - 1) // self.block_size
        return is_last and num_tokens >= least

    def admit(self, request: Request, prefix: CachedPrefix, num_new_tokens: int) -> bool:
        if prefix.snapshot is not None:
            self.snapshots.use(request.block_hashes[len(prefix.blocks) - 1])
        if not super().admit(request, prefix, num_new_tokens):
            return False
        self._last_saved.setdefault(request.request_id, prefix.num_tokens)
        if prefix.snapshot is not None:
            # It may have been evicted by now, for a state that is saved after this one is loaded.
            self._step.state_loads.append((prefix.snapshot, request.request_id))
        return True

    def _register(self, request: Request, num_tokens: int, begin: int) -> None:
        super()._register(request, num_tokens, begin)
        is_asked = self._save_at.pop(request.request_id, None) == num_tokens
        # The last token may be one that is not known yet.
        if not self.enable_caching or num_tokens % self.block_size or num_tokens > len(request.token_ids):
            return
        if num_tokens > begin and (is_asked or num_tokens % self._interval == 0):
            content_hash = extend_block_hashes(request, self.block_size)[num_tokens // self.block_size - 1]
            snapshot = self.snapshots.save(content_hash, request)
            self._last_saved[request.request_id] = num_tokens
            if snapshot is not None:
                self._step.state_saves.append((request.request_id, snapshot))

    def forget_step(self, request: Request, num_computed_before: int) -> None:
        super().forget_step(request, num_computed_before)
        dropped = self.snapshots.drop_saved(request)
        if dropped:
            saves = self._step.state_saves
            saves[:] = [(owner, snapshot) for owner, snapshot in saves if snapshot not in dropped]

    def free(self, request: Request) -> None:
        super().free(request)
        for held in (self._last_saved, self._save_at):
            held.pop(request.request_id, None)

    def finish_step(self) -> None:
        super().finish_step()
        self.snapshots.end_step()

    def forget_saves(self, step: SchedulerOutput) -> None:
        self.snapshots.forget_snapshots({snapshot for _, snapshot in step.state_saves})

    def forget_broken_states(self, request: Request) -> None:
        for content_hash in request.block_hashes:
            self.snapshots.forget(content_hash)

    def reset_prefix_cache(self) -> bool:
        if not super().reset_prefix_cache():
            return False
        self.snapshots.reset()
        return True

    def _evicted(self, block_id: int, content_hash: bytes) -> None:
        if self.host is None:
            # Without the block its end's state is of no use.
            self.snapshots.forget(content_hash)
            return
        super()._evicted(block_id, content_hash)
