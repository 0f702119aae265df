"""The blocks of each request; the prefix cache."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from vllm.config import CacheConfig
from vllm.v1.core.block_pool import BlockPool, extend_block_hashes, root_hash
from vllm.v1.core.cpu_offload import OffloadPool
from vllm.v1.core.partial_block_index import PartialBlockIndex
from vllm.v1.core.sched.output import SchedulerOutput, SharedTokens
from vllm.v1.request import Request

Blocks = tuple[list[int], ...]
"""Block ids of a request in each KV group."""


@dataclass
class PrefixCacheStats:
    """Prompt tokens looked up in the prefix cache and found there; blocks copied to the host and back."""

    num_prefix_queried_tokens: int = 0
    num_prefix_hit_tokens: int = 0
    num_swapped_out_blocks: int = 0
    num_swapped_in_blocks: int = 0


class CachedPrefix(NamedTuple):
    """The cached beginning of a request."""

    blocks: list[int | None]  # whole blocks on the device; None: on the host only
    num_tokens: int = 0  # in the whole blocks and in the part of one
    part_of: int | None = None  # block to copy the tokens beyond the whole blocks from
    shared_with: str | None = None  # instead of part_of: request that computes them in the step being scheduled
    snapshot: int | None = None  # of the state after it, for models with states


class KVCacheManager:
    """Allocates the requests' blocks and frees them.

    Full blocks are registered by content when they are scheduled, not after the step: within a step every layer writes
    all keys and values before any attention reads, so a request admitted later in the same step may share them.
    Where the cached prefix ends inside a block, the request gets a copy of a block that begins with the same tokens, if
    an earlier step wrote one. If the same step computes such a block from its beginning, the common tokens are written
    to both. With host blocks (CPU offload), evicted content is copied to the host and found there.
    """

    num_groups = 1
    has_states = False
    snapshot_interval: int | None = None
    """A step that ends at a multiple of so many tokens saves the request's state; None: none does."""
    cuts_shares = False
    """Whether a step's share of a request may have to end early: the scheduler then asks `share` and `awaits`."""

    def __init__(self, config: CacheConfig) -> None:
        if config.num_blocks is None:
            raise ValueError("num_blocks must be set before the scheduler is built")
        self.block_size = config.block_size
        self.enable_caching = config.enable_prefix_caching
        self._caches_hidden = config.caches_hidden_states
        self.host = OffloadPool(config.num_host_blocks) if self.enable_caching and config.num_host_blocks else None
        max_evictable = None
        if config.max_idle_tokens is not None:
            max_evictable = config.max_idle_tokens // config.block_size * self.num_groups
        on_evict = self._evicted if self.host is not None or self.cuts_shares else None
        self.pool = BlockPool(config.num_blocks, max_evictable, on_evict)
        self._shares_parts = self.enable_caching and config.shares_parts_of_blocks
        self._step: SchedulerOutput  # the step being scheduled, which gets the copies
        # Blocks that the step will have written up to these tokens: (request, index among its blocks, block, tokens).
        self._unwritten: list[tuple[Request, int, int, list[int]]] = []
        # Those that it writes from their beginning, and their requests.
        self._whole = PartialBlockIndex()
        self._owners: dict[int, str] = {}
        self.stats = PrefixCacheStats()
        self._blocks: dict[str, list[int]] = {}
        self._num_registered: dict[str, int] = {}  # leading blocks that were registered

    @property
    def usage(self) -> float:
        """Share of the blocks that are owned, in [0, 1]."""
        return 1 - self.pool.num_free / self.pool.num_blocks

    def blocks_of(self, request_id: str) -> list[int]:
        """The request's blocks in the first KV group, in order."""
        return self._blocks.get(request_id, [])

    def groups_of(self, request_id: str) -> Blocks:
        """The request's blocks in each KV group, in order; 0 where a group needs none."""
        return (list(self.blocks_of(request_id)),)

    def all_blocks_of(self, request_id: str) -> list[int]:
        """The request's blocks in all groups."""
        return self.blocks_of(request_id)

    def capacity(self, step_tokens: int) -> int:
        """Tokens of a request that all blocks together hold, where a step computes at most `step_tokens`."""
        return self.pool.num_blocks * self.block_size

    def find_prefix(self, request: Request) -> CachedPrefix:
        """The longest cached prefix without the last token, whose logits are needed. Where prompt positions are still
        to be read, it ends before the first block without hidden states (blocks on the host have none)."""
        if not self.enable_caching or request.sampling_params.skip_reading_prefix_cache:
            return CachedPrefix([])
        limit = (request.num_tokens - 1) // self.block_size
        blocks: list[int | None] = []
        first_row, host = request.next_prompt_row, self.host
        for content_hash in extend_block_hashes(request, self.block_size)[:limit]:
            block_id = self.pool.find(content_hash)
            if block_id is None and (host is None or host.find(content_hash) is None):
                break
            is_read = first_row is not None and first_row < (len(blocks) + 1) * self.block_size
            if is_read and (block_id is None or not self.pool.has_hidden(block_id)):
                break
            blocks.append(block_id)
        num_whole = len(blocks) * self.block_size
        if self._shares_parts:
            (written, num_written), (unwritten, num_unwritten) = self._find_parts(request, len(blocks))
            if num_unwritten > num_written:
                return CachedPrefix(blocks, num_whole + num_unwritten, shared_with=self._owners[unwritten])
            if num_written:
                return CachedPrefix(blocks, num_whole + num_written, part_of=written)
        return CachedPrefix(blocks, num_whole)

    def _find_parts(self, request: Request, index: int) -> tuple[tuple[int, int], tuple[int, int]]:
        """(block, number of common tokens) of the best block for the beginning of the request's block `index`: of those
        written, and of those to be written by the step. Not beyond a position to be read: it needs hidden states."""
        start = index * self.block_size
        end = min(start + self.block_size, request.num_tokens - 1)
        if request.next_prompt_row is not None:
            end = min(end, request.next_prompt_row)
        if start >= end:
            return (-1, 0), (-1, 0)
        parent, tokens = self._parent(request, index), request.token_ids[start:end]
        return self.pool.partial_blocks.find(parent, tokens), self._whole.find(parent, tokens)

    @staticmethod
    def _parent(request: Request, index: int) -> bytes:
        return request.block_hashes[index - 1] if index else root_hash(request.cache_salt, request.content_number)

    def admit(self, request: Request, prefix: CachedPrefix, num_new_tokens: int) -> bool:
        """Give a request its cached prefix and blocks for `num_new_tokens` more; False: too few are free."""
        num_cached = len(prefix.blocks)
        on_device = [block_id for block_id in prefix.blocks if block_id is not None]
        num_tokens = prefix.num_tokens + num_new_tokens
        num_missing = self._num_blocks_for(num_tokens) - len(on_device)
        taken_back = sum(map(self.pool.is_evictable, on_device))
        if num_missing > self.pool.num_free - taken_back:
            return False
        self.pool.share(on_device)
        if len(on_device) < num_cached:
            blocks = self._swap_in(request, prefix.blocks, num_missing)
        else:
            blocks = on_device + self.pool.allocate(num_missing)
        self._blocks[request.request_id] = blocks
        if prefix.part_of is not None:
            own = blocks[num_cached]
            # The block may have been free, and just been allocated for its own copy.
            if own != prefix.part_of:
                self._step.block_copies.append((prefix.part_of, own))
        if prefix.shared_with is not None:
            start = num_cached * self.block_size
            shared = SharedTokens(prefix.shared_with, request.request_id, start, prefix.num_tokens - start)
            self._step.shared_tokens.append(shared)
        request.hidden_from = request.next_prompt_row if self._caches_hidden else None
        self._num_registered[request.request_id] = num_cached
        # After a preemption the prefix is the request's work, not a cache hit.
        if self.enable_caching and request.num_preemptions == 0:
            self.stats.num_prefix_queried_tokens += request.num_tokens
            self.stats.num_prefix_hit_tokens += prefix.num_tokens
        self._register(request, num_tokens, prefix.num_tokens)
        self._note(request, num_tokens // self.block_size, num_tokens, prefix.num_tokens)
        return True

    def grow(self, request: Request, num_new_tokens: int) -> Blocks | None:
        """Allocate for `num_new_tokens` beyond the computed ones: the blocks added in each KV group, or () where none
        are; None: too few are free."""
        num_tokens = request.num_computed_tokens + num_new_tokens
        if num_new_tokens == 1 and num_tokens % self.block_size > 1:
            # Fast path of most decodes: the last block neither begins nor becomes full.
            return ()
        blocks = self._blocks[request.request_id]
        missing = self.num_missing_blocks(request, num_new_tokens)
        if missing > self.pool.num_free:
            return None
        added = self.pool.allocate(missing) if missing > 0 else []
        blocks += added
        self._register(request, num_tokens, request.num_computed_tokens)
        if num_new_tokens > 1:
            self._note(request, num_tokens // self.block_size, num_tokens, request.num_computed_tokens)
        return (added,) if added else ()

    def num_missing_blocks(self, request: Request, num_new_tokens: int) -> int:
        """Blocks to allocate for `num_new_tokens` beyond the computed ones; none if not above 0."""
        num_blocks = self._num_blocks_for(request.num_computed_tokens + num_new_tokens)
        return num_blocks - len(self._blocks[request.request_id])

    def register_known(self, request: Request) -> None:
        """Register full blocks of tokens that became known after a step had begun to compute them."""
        num_known = min(request.num_computed_tokens, len(request.token_ids))
        self._register(request, num_known, num_known)

    def forget_step(self, request: Request, num_computed_before: int) -> None:
        """Unregister the blocks that a step begun at `num_computed_before` was to fill: it did not write them."""
        for block_id in self.blocks_of(request.request_id)[num_computed_before // self.block_size :]:
            self.pool.unregister(block_id)

    def forget_broken_content(self, block_ids: list[int]) -> None:
        """Unregister blocks with corrupted content, and its copies on the host."""
        for block_id in block_ids:
            content_hash = self.pool.unregister(block_id)
            if content_hash is not None and self.host is not None:
                self.host.forget(content_hash)

    def begin_step(self, step: SchedulerOutput) -> None:
        """A step is being scheduled: `admit` and `grow` add their copies and shared tokens to it."""
        self._step = step

    def finish_step(self) -> None:
        """The step is scheduled; the next one may copy from the blocks that it writes."""
        for request, index, block_id, token_ids in self._unwritten:
            # A preempted request has lost its blocks, unwritten.
            if self.blocks_of(request.request_id)[index : index + 1] == [block_id]:
                self.pool.partial_blocks.add(block_id, self._parent(request, index), token_ids)
        self._unwritten.clear()
        self._whole.clear()
        self._owners.clear()
        if self.host is not None:
            self.host.end_step()
            self.stats.num_swapped_out_blocks += len(self._step.swap_out)
            self.stats.num_swapped_in_blocks += len(self._step.swap_in)

    def forget_swaps(self, swap_out: list[tuple[int, int]], swap_in: list[tuple[int, int]]) -> None:
        """A step's copies may not have been made."""
        for _, host_block in swap_out:
            assert self.host is not None
            self.host.forget_block(host_block)
        for _, block_id in swap_in:
            self.pool.unregister(block_id)

    # Of models with states; see StateCacheManager.

    def note_waiting(self, request: Request) -> None:
        """A request waits to be admitted."""

    def note_not_waiting(self, request: Request) -> None:
        """It was admitted, or ended."""

    def awaits(self, request: Request, prefix: CachedPrefix) -> bool:
        """Whether the request should wait for a longer prefix than this one, which the step being scheduled makes."""
        return False

    def share(self, request: Request, start: int, num_new_tokens: int) -> int:
        """How many of the request's next tokens, from `start` on, the step should compute."""
        return num_new_tokens

    def forget_saves(self, step: SchedulerOutput) -> None:
        """The states that a step was to save may not have been."""

    def forget_broken_states(self, request: Request) -> None:
        """What was saved of the request's states may be corrupted."""

    def free(self, request: Request) -> None:
        """Free the request's blocks, the tail first, so that the common beginning stays cached longest."""
        blocks = self._blocks.pop(request.request_id, None)
        self._num_registered.pop(request.request_id, None)
        if blocks:
            self.pool.release(reversed(blocks))

    def reset_prefix_cache(self) -> bool:
        """Forget all cached content, also on the host; False, and nothing done, while any block is owned."""
        if not self.pool.reset():
            return False
        if self.host is not None:
            self.host.reset()
        return True

    def _evicted(self, block_id: int, content_hash: bytes) -> None:
        assert self.host is not None
        host_block = self.host.store(content_hash)
        if host_block is not None:
            self._step.swap_out.append((block_id, host_block))

    def _swap_in(self, request: Request, cached: list[int | None], num_missing: int) -> list[int]:
        """The request's blocks: those on the device and `num_missing` new ones, the first of them for swap-in."""
        assert self.host is not None
        prefix = list(zip(cached, request.block_hashes, strict=False))
        # The end of a prefix is useful to the fewest requests, so it is to be evicted first.
        for block_id, content_hash in reversed(prefix):
            if block_id is None:
                self.host.use(content_hash)
        new = iter(self.pool.allocate(num_missing))
        blocks = []
        for block_id, content_hash in prefix:
            if block_id is None:
                block_id = next(new)
                host_block = self.host.find(content_hash)
                assert host_block is not None
                self._step.swap_in.append((host_block, block_id))
                self.pool.register(block_id, content_hash)
            blocks.append(block_id)
        return [*blocks, *new]

    def _register(self, request: Request, num_tokens: int, begin: int) -> None:
        """Register the request's full blocks up to `num_tokens`; the step computes it from `begin`."""
        first, full = self._num_registered[request.request_id], num_tokens // self.block_size
        if not self.enable_caching or full <= first:
            return
        hashes = extend_block_hashes(request, self.block_size)
        blocks = self._blocks[request.request_id]
        full = min(full, len(hashes))
        for index in range(first, full):
            self.pool.register(blocks[index], hashes[index], request.keeps_hidden(index, self.block_size))
            self._note(request, index, (index + 1) * self.block_size, begin)
        self._num_registered[request.request_id] = full

    def _note(self, request: Request, index: int, end: int, begin: int) -> None:
        """The step, which computes from `begin`, fills the request's block `index` up to the token `end`."""
        start = index * self.block_size
        token_ids = request.token_ids[start:end] if self._shares_parts else []
        if not token_ids:
            return
        block_id = self._blocks[request.request_id][index]
        self._unwritten.append((request, index, block_id, token_ids))
        if start >= begin:
            self._whole.add(block_id, self._parent(request, index), token_ids)
            self._owners[block_id] = request.request_id

    def _num_blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)
