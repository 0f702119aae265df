"""The blocks of each request in several KV groups, of which some see the tokens of a window only."""

from __future__ import annotations

from vllm.config import CacheConfig
from vllm.config.cache import Chunks, Window
from vllm.v1.core.block_pool import extend_block_hashes
from vllm.v1.core.kv_cache_manager import Blocks, CachedPrefix, KVCacheManager
from vllm.v1.request import Request

NO_BLOCK = -1
"""In place of a block that a group no longer needs or never needed."""


def first_needed_block(num_computed: int, window: Window, block_size: int) -> int:
    """The first block that the query at position `num_computed`, or a later one, sees a token of."""
    if isinstance(window, Chunks):
        return num_computed // window.size * window.size // block_size
    return 0 if window is None else max(num_computed - window + 1, 0) // block_size


def blocks_needed(num_tokens: int, step_tokens: int, windows: tuple[Window, ...], block_size: int) -> int:
    """The most blocks that a request of `num_tokens` has at once, where a step computes at most `step_tokens`."""
    whole = -(-num_tokens // block_size)
    needed = 0
    for window in windows:
        if window is None:
            needed += whole
            continue
        seen = window.size if isinstance(window, Chunks) else window
        needed += min(-(-(seen - 1 + min(step_tokens, num_tokens)) // block_size) + 1, whole)
    return needed


class GroupedKVCacheManager(KVCacheManager):
    """As KVCacheManager, for several groups or for windows.

    All groups take blocks from one pool. A request's block `index` holds the same tokens in each group. At each
    new block a group with a window releases those that no later query sees; they stay cached until they are needed.
    Content is registered by its hash in the first group, and by the hash and the group's number in the others. A
    cached prefix must be whole in groups without a window, and in the others from the first block on that the next
    query sees. A prefix ends at a whole block.
    """

    def __init__(self, config: CacheConfig) -> None:
        self.windows = config.group_windows
        self.num_groups = len(self.windows)
        super().__init__(config)
        self._shares_parts = False
        self._groups: dict[str, Blocks] = {}  # the first are those of `_blocks`
        self._num_released: dict[str, list[int]] = {}  # leading blocks without an owner, by group

    def groups_of(self, request_id: str) -> Blocks:
        return tuple([max(block, 0) for block in blocks] for blocks in self._groups[request_id])

    def blocks_of(self, request_id: str) -> list[int]:
        return [max(block, 0) for block in self._blocks.get(request_id, [])]

    def all_blocks_of(self, request_id: str) -> list[int]:
        return [block for blocks in self._groups.get(request_id, ()) for block in blocks if block != NO_BLOCK]

    def capacity(self, step_tokens: int) -> int:
        num_blocks = self.pool.num_blocks
        fits, too_many = 0, num_blocks * self.block_size + 1
        if all(window is not None for window in self.windows):
            too_many = 2**62
        while too_many - fits > 1:
            middle = (fits + too_many) // 2
            if blocks_needed(middle, step_tokens, self.windows, self.block_size) <= num_blocks:
                fits = middle
            else:
                too_many = middle
        return fits

    def find_prefix(self, request: Request) -> CachedPrefix:
        if not self.enable_caching or request.sampling_params.skip_reading_prefix_cache:
            return CachedPrefix([])
        hashes = extend_block_hashes(request, self.block_size)[: (request.num_tokens - 1) // self.block_size]
        count = self._num_cached_blocks(hashes, request.next_prompt_row)
        return CachedPrefix([None] * count, count * self.block_size)

    def _num_cached_blocks(self, hashes: list[bytes], first_row: int | None) -> int:
        """Blocks of the longest prefix that every group has what it needs of; see the base class for `first_row`."""
        count = len(hashes)
        if first_row is not None:
            for index in range(min(first_row // self.block_size, count), count):
                block_id = self.pool.find(hashes[index])
                if block_id is None or not self.pool.has_hidden(block_id):
                    count = index
                    break
        group = 0
        while group < self.num_groups:
            index = count - 1
            first = self._first_of_prefix(group, count, first_row)
            while index >= first and self._is_cached(group, hashes[index]):
                index -= 1
            if index < first:
                group += 1
            else:
                # Shorter prefixes end before the missing block, and may need others of every group.
                count, group = index, 0
        return count

    def _first_of_prefix(self, group: int, count: int, first_row: int | None) -> int:
        """The first block that a prefix of `count` blocks has to have in a group: hidden states lie in the first."""
        first = first_needed_block(count * self.block_size, self.windows[group], self.block_size)
        return min(first, first_row // self.block_size) if first_row is not None and group == 0 else first

    def _is_cached(self, group: int, content_hash: bytes) -> bool:
        key = self._key(group, content_hash)
        return self.pool.find(key) is not None or (self.host is not None and self.host.find(key) is not None)

    @staticmethod
    def _key(group: int, content_hash: bytes) -> bytes:
        return content_hash + group.to_bytes(2, "little") if group else content_hash

    def admit(self, request: Request, prefix: CachedPrefix, num_new_tokens: int) -> bool:
        count, hashes = len(prefix.blocks), request.block_hashes
        num_tokens = prefix.num_tokens + num_new_tokens
        num_new = self._num_blocks_for(num_tokens) - count
        keys = [
            [
                self._key(group, each)
                for each in hashes[self._first_of_prefix(group, count, request.next_prompt_row) : count]
            ]
            for group in range(self.num_groups)
        ]
        on_device = [block for row in keys for key in row if (block := self.pool.find(key)) is not None]
        num_missing = sum(map(len, keys)) - len(on_device) + num_new * self.num_groups
        if num_missing > self.pool.num_free - sum(map(self.pool.is_evictable, on_device)):
            return False
        self.pool.share(on_device)
        self._keep_on_host(keys)
        groups = self._take_prefix(keys, self.pool.allocate(num_missing))
        groups = [[NO_BLOCK] * (count - len(row)) + blocks for row, blocks in zip(keys, groups, strict=True)]
        self._groups[request.request_id], self._blocks[request.request_id] = tuple(groups), groups[0]
        self._num_released[request.request_id] = [count - len(row) for row in keys]
        request.hidden_from = request.next_prompt_row if self._caches_hidden else None
        self._num_registered[request.request_id] = count
        if self.enable_caching and request.num_preemptions == 0:
            self.stats.num_prefix_queried_tokens += request.num_tokens
            self.stats.num_prefix_hit_tokens += prefix.num_tokens
        self._register(request, num_tokens, prefix.num_tokens)
        return True

    def _keep_on_host(self, keys: list[list[bytes]]) -> None:
        """Content on the host is used: what is evicted next does not take its place there."""
        if self.host is not None:
            # The end of a prefix is useful to the fewest requests, so it is to be evicted first.
            for key in (key for row in keys for key in reversed(row)):
                if self.pool.find(key) is None:
                    self.host.use(key)

    def _take_prefix(self, keys: list[list[bytes]], new: list[int]) -> list[list[int]]:
        """Each group's blocks: those of `keys`, on the device or swapped in, and its share of the other new ones."""
        num_new = (len(new) - sum(self.pool.find(key) is None for row in keys for key in row)) // self.num_groups
        fresh, groups = iter(new), []
        for row in keys:
            blocks = []
            for key in row:
                block_id = self.pool.find(key)
                if block_id is None:
                    assert self.host is not None
                    block_id, host_block = next(fresh), self.host.find(key)
                    assert host_block is not None
                    self._step.swap_in.append((host_block, block_id))
                    self.pool.register(block_id, key)
                blocks.append(block_id)
            groups.append(blocks)
        return [[*blocks, *(next(fresh) for _ in range(num_new))] for blocks in groups]

    def grow(self, request: Request, num_new_tokens: int) -> Blocks | None:
        num_tokens = request.num_computed_tokens + num_new_tokens
        if num_new_tokens == 1 and num_tokens % self.block_size > 1:
            return ()
        self._release_passed(request)
        missing = max(self.num_missing_blocks(request, num_new_tokens), 0)
        if missing > self.pool.num_free:
            return None
        added = self.pool.allocate(missing)
        share = missing // self.num_groups
        parts = tuple(added[share * group : share * (group + 1)] for group in range(self.num_groups))
        for blocks, part in zip(self._groups[request.request_id], parts, strict=True):
            blocks += part
        self._register(request, num_tokens, request.num_computed_tokens)
        return parts if added else ()

    def num_missing_blocks(self, request: Request, num_new_tokens: int) -> int:
        return super().num_missing_blocks(request, num_new_tokens) * self.num_groups

    def _release_passed(self, request: Request) -> None:
        """Release the blocks that no query from the first one not computed on sees."""
        released = self._num_released[request.request_id]
        for group, blocks in enumerate(self._groups[request.request_id]):
            first = first_needed_block(request.num_computed_tokens, self.windows[group], self.block_size)
            first = min(first, self._num_registered[request.request_id] if self.enable_caching else first)
            if first > released[group]:
                passed = range(released[group], first)
                self.pool.release(blocks[index] for index in passed)
                blocks[passed.start : first] = [NO_BLOCK] * len(passed)
                released[group] = first

    def _register(self, request: Request, num_tokens: int, begin: int) -> None:
        first, full = self._num_registered[request.request_id], num_tokens // self.block_size
        if not self.enable_caching or full <= first:
            return
        hashes = extend_block_hashes(request, self.block_size)
        full = min(full, len(hashes))
        for group, blocks in enumerate(self._groups[request.request_id]):
            for index in range(first, full):
                keeps_hidden = group == 0 and request.keeps_hidden(index, self.block_size)
                self.pool.register(blocks[index], self._key(group, hashes[index]), keeps_hidden)
        self._num_registered[request.request_id] = full

    def forget_step(self, request: Request, num_computed_before: int) -> None:
        for blocks in self._groups.get(request.request_id, ()):
            for block_id in blocks[num_computed_before // self.block_size :]:
                if block_id != NO_BLOCK:
                    self.pool.unregister(block_id)

    def free(self, request: Request) -> None:
        groups = self._groups.get(request.request_id, ())
        for held in (self._blocks, self._groups, self._num_registered, self._num_released):
            held.pop(request.request_id, None)  # type: ignore[attr-defined]
        for blocks in groups:
            self.pool.release(block for block in reversed(blocks) if block != NO_BLOCK)
