"""The blocks of each request; the prefix cache."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import NamedTuple

from vllm.config import CacheConfig
from vllm.v1.core.block_pool import BlockPool, PartialBlockIndex, extend_block_hashes, root_hash
from vllm.v1.core.guests import SchedulerGuest, hooks
from vllm.v1.core.kv_cache_groups import NO_BLOCK, Blocks, FullGroup, WindowGroup, hidden_key, make_groups
from vllm.v1.core.sched.output import SchedulerOutput, SharedTokens
from vllm.v1.request import Request


class Part(NamedTuple):
    """The cached beginning of a block."""

    num_tokens: int
    block: int  # that has it
    owner: str | None  # the request that computes it in the step being scheduled; None: it is written


class PartsOfBlocks:
    """Where the cached prefix ends inside a block, the request gets a copy of a block that begins with the same tokens,
    if an earlier step wrote one. If the same step computes such a block from its beginning, the common tokens are
    written to both."""

    def __init__(self, pool: BlockPool, block_size: int) -> None:
        self._written, self._block_size = pool.partial_blocks, block_size
        # Blocks that the step will have written up to these tokens: (request, index among its blocks, block, tokens).
        self._unwritten: list[tuple[Request, int, int, list[int]]] = []
        # The blocks that it writes from their beginning, and their requests.
        self._whole = PartialBlockIndex()
        self._owners: dict[int, str] = {}

    def find(self, request: Request, index: int) -> Part | None:
        """The longest beginning of the request's block `index`. Not beyond a position to be read: it needs hidden
        states."""
        start = index * self._block_size
        end = min(start + self._block_size, request.num_tokens - 1)
        if request.next_prompt_row is not None:
            end = min(end, request.next_prompt_row)
        if start >= end:
            return None
        parent, tokens = self._parent(request, index), request.token_ids[start:end]
        written, num_written = self._written.find(parent, tokens)
        unwritten, num_unwritten = self._whole.find(parent, tokens)
        if num_unwritten > num_written:
            return Part(num_unwritten, unwritten, self._owners[unwritten])
        return Part(num_written, written, None) if num_written else None

    def note(self, request: Request, index: int, block_id: int, end: int, begin: int) -> None:
        """The step, which computes from `begin`, fills the request's block `index` up to the token `end`."""
        start = index * self._block_size
        token_ids = request.token_ids[start:end]
        if not token_ids:
            return
        self._unwritten.append((request, index, block_id, token_ids))
        if start >= begin:
            self._whole.add(block_id, self._parent(request, index), token_ids)
            self._owners[block_id] = request.request_id

    def finish_step(self, owns: Callable[[Request, int, int], bool]) -> None:
        """The step is scheduled; the next one may copy from the blocks that it writes, of those that requests still
        own: a preempted one has lost its blocks, unwritten."""
        for request, index, block_id, token_ids in self._unwritten:
            if owns(request, index, block_id):
                self._written.add(block_id, self._parent(request, index), token_ids)
        self._unwritten.clear()
        self._whole.clear()
        self._owners.clear()

    @staticmethod
    def _parent(request: Request, index: int) -> bytes:
        return request.block_hashes[index - 1] if index else root_hash(request.cache_salt, request.content_number)


@dataclass
class PrefixCacheStats:
    """Prompt tokens looked up in the prefix cache and found there."""

    num_prefix_queried_tokens: int = 0
    num_prefix_hit_tokens: int = 0


class CachedPrefix(NamedTuple):
    """The cached beginning of a request."""

    num_blocks: int = 0  # whole ones
    num_tokens: int = 0  # in the whole blocks and in the part of one
    part_of: int | None = None  # block to copy the tokens beyond the whole blocks from
    shared_with: str | None = None  # instead of part_of: request that computes them in the step being scheduled


@dataclass(slots=True)
class OwnedBlocks:
    """A request's blocks; `index` means the same tokens in each group."""

    groups: Blocks  # NO_BLOCK where a group needs none
    num_registered: int  # leading blocks
    num_released: list[int]  # leading blocks without an owner, by group


class KVCacheManager:
    """Allocates the requests' blocks in all KV groups and frees them.

    All groups take blocks from one pool. At each new block a group with a window releases those that no later query
    sees; they stay cached until they are needed. A cached prefix must have what each group needs of it, and be one for
    the guests that limit it.

    Full blocks are registered by content when they are scheduled, not after the step: within a step every layer writes
    all keys and values before any attention reads, so a request admitted later in the same step may share them. With a
    single group that sees all, parts of blocks are shared, too. Guests may take evicted content, and bring it back.
    """

    def __init__(self, config: CacheConfig) -> None:
        if config.num_blocks is None:
            raise ValueError("num_blocks must be set before the scheduler is built")
        self.block_size = config.block_size
        self.enable_caching = config.finds_prefixes
        self.groups = make_groups(config.group_windows, config.block_size)
        self.num_groups = len(self.groups)
        self._full = [group for group in self.groups if group.window is None]
        self._windowed = [group for group in self.groups if isinstance(group, WindowGroup)]
        self._caches_hidden = config.caches_hidden_states
        max_evictable = None
        if config.max_idle_tokens is not None:
            max_evictable = config.max_idle_tokens // config.block_size * self.num_groups
        self.pool = BlockPool(config.num_blocks, max_evictable)
        self._parts: PartsOfBlocks | None = None
        if self.enable_caching and config.shares_parts_of_blocks and self.num_groups == len(self._full) == 1:
            self._parts = PartsOfBlocks(self.pool, self.block_size)
        self._step: SchedulerOutput  # the step being scheduled, which gets the copies
        self.stats = PrefixCacheStats()
        self.owned: dict[str, OwnedBlocks] = {}
        self.use_guests(())

    def use_guests(self, guests: Sequence[SchedulerGuest]) -> None:
        """Call these from now on. No request may be there."""
        self._limits, self._holds = hooks(guests, "longest_prefix"), hooks(guests, "holds")
        self._num_held = hooks(guests, "num_held")
        self._keeps, self._brings = hooks(guests, "keep"), hooks(guests, "bring")
        self._takes, self._on_lost = hooks(guests, "take"), hooks(guests, "lost")
        self._on_broken, self._on_reset = hooks(guests, "broken"), hooks(guests, "reset_cache")
        self.pool.on_evict = self._evicted if self._takes or self._on_lost else None
        if self._limits:
            # Such a prefix ends at a whole block.
            self._parts = None

    @property
    def usage(self) -> float:
        """Share of the blocks that are owned, in [0, 1]."""
        return 1 - self.pool.num_free / self.pool.num_blocks

    def blocks_of(self, request_id: str) -> Blocks:
        """The request's blocks in each KV group, in order; 0 where a group needs none."""
        return tuple([max(block, 0) for block in blocks] for blocks in self.owned[request_id].groups)

    def capacity(self, step_tokens: int) -> int:
        """Tokens of a request that all blocks together hold, where a step computes at most `step_tokens`."""
        num_blocks = self.pool.num_blocks
        fits, too_many = 0, num_blocks * self.block_size + 1 if self._full else 2**62
        while too_many - fits > 1:
            middle = (fits + too_many) // 2
            if sum(group.most_blocks(middle, step_tokens) for group in self.groups) <= num_blocks:
                fits = middle
            else:
                too_many = middle
        return fits

    def find_prefix(self, request: Request) -> CachedPrefix:
        """The longest cached prefix without the last token, whose logits are needed. Where prompt positions are still
        to be read, it ends before the first block without hidden states (blocks elsewhere have none)."""
        if not self.enable_caching or request.sampling_params.skip_reading_prefix_cache:
            return CachedPrefix()
        hashes = extend_block_hashes(request, self.block_size)[: (request.num_tokens - 1) // self.block_size]
        count = self._num_cached_blocks(request, hashes)
        num_whole = count * self.block_size
        if self._parts is not None and (part := self._parts.find(request, count)) is not None:
            written = None if part.owner is not None else part.block
            return CachedPrefix(count, num_whole + part.num_tokens, written, part.owner)
        return CachedPrefix(count, num_whole)

    def _num_cached_blocks(self, request: Request, hashes: list[bytes]) -> int:
        """Blocks of the longest prefix that every group has what it needs of."""
        count, first_row = len(hashes), request.next_prompt_row
        for full in self._full:
            # Most of a long prefix is on the device, so that not every block is asked for by itself.
            known = self.pool.num_leading(full.keys(hashes[:count]))
            for num_held in self._num_held:
                known += num_held(full.keys(hashes[known:count]))
            count = known + full.longest_prefix(hashes[known:], count - known, self.is_cached)
        if first_row is not None:
            for index in range(min(first_row // self.block_size, count), count):
                if not self._has_hidden(hashes[index]):
                    count = index
                    break
        before = -1
        # A shorter prefix may need others of every group.
        while count != before:
            before = count
            for windowed in self._windowed:
                count = windowed.longest_prefix(hashes, count, self.is_cached)
            for limit in self._limits:
                count = limit(request, hashes, count)
        return count

    def _has_hidden(self, key: bytes) -> bool:
        """Whether final hidden states lie beside the first group's content of this key, or can be brought with it."""
        block_id = self.pool.find(key)
        if block_id is not None:
            return self.pool.has_hidden(block_id)
        return self.is_held(hidden_key(key))

    def is_cached(self, key: bytes) -> bool:
        """Whether there is content of this key, on the device or where a guest can bring it from."""
        return self.pool.find(key) is not None or self.is_held(key)

    def is_held(self, key: bytes) -> bool:
        """Whether a guest can bring content of this key."""
        # A loop, as this is asked of each block of a prompt.
        for holds in self._holds:  # noqa: SIM110
            if holds(key):
                return True
        return False

    def admit(self, request: Request, prefix: CachedPrefix, num_new_tokens: int) -> bool:
        """Give a request its cached prefix and blocks for `num_new_tokens` more; False: too few are free."""
        count, num_tokens = prefix.num_blocks, prefix.num_tokens + num_new_tokens
        num_new = self._num_blocks_for(num_tokens) - count
        keys = [self._keys_of_prefix(group, request, count) for group in self.groups]
        on_device = [block for key in chain(*keys) if (block := self.pool.find(key)) is not None]
        num_missing = sum(map(len, keys)) - len(on_device) + num_new * self.num_groups
        if num_missing > self.pool.num_free - sum(map(self.pool.is_evictable, on_device)):
            return False
        self.pool.share(on_device)
        for keep in self._keeps:
            # The end of a prefix is useful to the fewest requests, so it is to be evicted first.
            keep([key for row in keys for key in reversed(row) if self.pool.find(key) is None])
        groups = self._take_prefix(keys, count, num_new, self.pool.allocate(num_missing))
        self.owned[request.request_id] = OwnedBlocks(groups, count, [count - len(row) for row in keys])
        if prefix.part_of is not None:
            own = groups[0][count]
            # The block may have been free, and just been allocated for its own copy.
            if own != prefix.part_of:
                self._step.block_copies.append((prefix.part_of, own))
        if prefix.shared_with is not None:
            start = count * self.block_size
            shared = SharedTokens(prefix.shared_with, request.request_id, start, prefix.num_tokens - start)
            self._step.shared_tokens.append(shared)
        request.hidden_from = request.next_prompt_row if self._caches_hidden else None
        # After a preemption the prefix is the request's work, not a cache hit.
        if self.enable_caching and request.num_preemptions == 0:
            self.stats.num_prefix_queried_tokens += request.num_tokens
            self.stats.num_prefix_hit_tokens += prefix.num_tokens
        self._register(request, num_tokens, prefix.num_tokens)
        self._note_part(request, num_tokens, prefix.num_tokens)
        return True

    def _keys_of_prefix(self, group: FullGroup, request: Request, count: int) -> list[bytes]:
        """The keys that a prefix of `count` blocks has to have in a group: hidden states, too, lie in the first."""
        first = group.first_needed(count * self.block_size)
        if group is self.groups[0] and request.next_prompt_row is not None:
            first = min(first, request.next_prompt_row // self.block_size)
        return group.keys(request.block_hashes[first:count])

    def keys_of_prefix(self, request: Request, count: int) -> list[bytes]:
        """The keys of all content that a prefix of `count` whole blocks has to have."""
        keys = [key for group in self.groups for key in self._keys_of_prefix(group, request, count)]
        if request.next_prompt_row is not None:
            keys += map(hidden_key, request.block_hashes[request.next_prompt_row // self.block_size : count])
        return keys

    def filled_blocks(self, request: Request, first: int, full: int) -> Iterator[tuple[bytes, int]]:
        """The request's full blocks from number `first` to before `full`, in each group that needs them, by the keys
        of their content; those with final hidden states by that key, too."""
        hashes = extend_block_hashes(request, self.block_size)[first:full]
        for group, blocks in zip(self.groups, self._groups_of(request), strict=True):
            for content_hash, block_id in zip(hashes, blocks[first:full], strict=True):
                if block_id != NO_BLOCK:
                    yield group.key(content_hash), block_id
        for index, content_hash in enumerate(hashes, first):
            if request.keeps_hidden(index, self.block_size):
                yield hidden_key(content_hash), self._groups_of(request)[0][index]

    def _take_prefix(self, keys: list[list[bytes]], count: int, num_new: int, allocated: list[int]) -> Blocks:
        """Each group's blocks: `count` of the prefix, on the device or brought there, and `num_new` others."""
        fresh, groups = iter(allocated), []
        for row in keys:
            blocks = [NO_BLOCK] * (count - len(row))
            for key in row:
                block_id = self.pool.find(key)
                if block_id is None:
                    block_id = self._bring(key, next(fresh))
                blocks.append(block_id)
            groups.append(blocks)
        return tuple([*blocks, *(next(fresh) for _ in range(num_new))] for blocks in groups)

    def bring(self, key: bytes, number: int) -> None:
        """Have the guest that holds this content fill the block of this number with it, or the snapshot where it is a
        state, in the step being scheduled."""
        is_brought = any(bring(key, number, self._step) for bring in self._brings)
        assert is_brought, "a guest has lost what it held"

    def _bring(self, key: bytes, block_id: int) -> int:
        self.bring(key, block_id)
        self._step.brought_blocks.append(block_id)
        has_hidden = any(bring(hidden_key(key), block_id, self._step) for bring in self._brings)
        self.pool.register(block_id, key, has_hidden)
        return block_id

    def grow(self, request: Request, num_new_tokens: int) -> Blocks | None:
        """Allocate for `num_new_tokens` beyond the computed ones: the blocks added in each KV group, or () where none
        are; None: too few are free."""
        num_tokens = request.num_computed_tokens + num_new_tokens
        if num_new_tokens == 1 and num_tokens % self.block_size > 1:
            # Fast path of most decodes: the last block neither begins nor becomes full.
            return ()
        if self._windowed:
            self._release_passed(request)
        missing = max(self.num_missing_blocks(request, num_new_tokens), 0)
        if missing > self.pool.num_free:
            return None
        parts: Blocks = ()
        if missing:
            added, share = self.pool.allocate(missing), missing // self.num_groups
            parts = tuple(added[share * group : share * (group + 1)] for group in range(self.num_groups))
            for blocks, part in zip(self.owned[request.request_id].groups, parts, strict=True):
                blocks += part
        self._register(request, num_tokens, request.num_computed_tokens)
        if num_new_tokens > 1:
            self._note_part(request, num_tokens, request.num_computed_tokens)
        return parts

    def num_missing_blocks(self, request: Request, num_new_tokens: int) -> int:
        """Blocks to allocate for `num_new_tokens` beyond the computed ones; none if not above 0."""
        num_blocks = self._num_blocks_for(request.num_computed_tokens + num_new_tokens)
        return (num_blocks - len(self.owned[request.request_id].groups[0])) * self.num_groups

    def _release_passed(self, request: Request) -> None:
        """Release the blocks that no query from the first one not computed on sees."""
        owned = self.owned[request.request_id]
        for number, (group, blocks) in enumerate(zip(self.groups, owned.groups, strict=True)):
            first = group.first_needed(request.num_computed_tokens)
            if self.enable_caching:
                first = min(first, owned.num_registered)
            released = owned.num_released[number]
            if first > released:
                self.pool.release(blocks[released:first])
                blocks[released:first] = [NO_BLOCK] * (first - released)
                owned.num_released[number] = first

    def register_known(self, request: Request) -> None:
        """Register full blocks of tokens that became known after a step had begun to compute them."""
        num_known = min(request.num_computed_tokens, len(request.token_ids))
        self._register(request, num_known, num_known)

    def forget_step(self, request: Request, num_computed_before: int) -> None:
        """Unregister the blocks that a step begun at `num_computed_before` was to fill: it did not write them."""
        for blocks in self._groups_of(request):
            for block_id in blocks[num_computed_before // self.block_size :]:
                if block_id != NO_BLOCK:
                    self.pool.unregister(block_id)

    def forget_brought(self, step: SchedulerOutput) -> None:
        """The step failed: unregister the blocks whose content may not have been brought."""
        for block_id in step.brought_blocks:
            self.pool.unregister(block_id)

    def forget_broken(self, request: Request) -> None:
        """Unregister the request's blocks, whose content may be corrupted, wherever it is."""
        keys = []
        for block_id in chain(*self._groups_of(request)):
            if block_id != NO_BLOCK and (key := self.pool.unregister(block_id)) is not None:
                keys.append(key)
        for broken in self._on_broken:
            broken(request, keys)

    def begin_step(self, step: SchedulerOutput) -> None:
        """A step is being scheduled: `admit` and `grow` add their copies and shared tokens to it."""
        self._step = step

    def finish_step(self) -> None:
        """The step is scheduled; the next one may copy from the blocks that it writes."""
        if self._parts is not None:
            self._parts.finish_step(self._owns)

    def _owns(self, request: Request, index: int, block_id: int) -> bool:
        groups = self._groups_of(request)
        return bool(groups) and groups[0][index : index + 1] == [block_id]

    def _groups_of(self, request: Request) -> Blocks:
        owned = self.owned.get(request.request_id)
        return () if owned is None else owned.groups

    def free(self, request: Request) -> None:
        """Free the request's blocks, the tail first, so that the common beginning stays cached longest."""
        owned = self.owned.pop(request.request_id, None)
        if owned is not None:
            for blocks in owned.groups:
                self.pool.release(block for block in reversed(blocks) if block != NO_BLOCK)

    def reset_prefix_cache(self) -> bool:
        """Forget all cached content, also that of guests; False, and nothing done, while any block is owned."""
        if not self.pool.reset():
            return False
        for reset in self._on_reset:
            reset()
        return True

    def _evicted(self, block_id: int, key: bytes) -> None:
        if not any(take(key, block_id, self._step) for take in self._takes):
            for lost in self._on_lost:
                lost(key)

    def _register(self, request: Request, num_tokens: int, begin: int) -> None:
        """Register the request's full blocks up to `num_tokens`; the step computes it from `begin`."""
        owned = self.owned[request.request_id]
        first, full = owned.num_registered, num_tokens // self.block_size
        if not self.enable_caching or full <= first:
            return
        hashes = extend_block_hashes(request, self.block_size)
        full = min(full, len(hashes))
        for group, blocks in zip(self.groups, owned.groups, strict=True):
            is_first = group is self.groups[0]
            for index in range(first, full):
                keeps_hidden = is_first and request.keeps_hidden(index, self.block_size)
                self.pool.register(blocks[index], group.key(hashes[index]), keeps_hidden)
        if self._parts is not None:
            for index in range(first, full):
                end = (index + 1) * self.block_size
                self._parts.note(request, index, owned.groups[0][index], end, begin)
        owned.num_registered = full

    def _note_part(self, request: Request, num_tokens: int, begin: int) -> None:
        """The step fills the request's last block up to `num_tokens`, a part of it or none."""
        index = num_tokens // self.block_size
        if self._parts is not None and num_tokens % self.block_size:
            self._parts.note(request, index, self.owned[request.request_id].groups[0][index], num_tokens, begin)

    def _num_blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)
