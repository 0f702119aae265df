"""Which blocks each request owns; the prefix cache."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from vllm.v1.core.block_pool import BlockPool, extend_block_hashes, root_hash
from vllm.v1.core.cpu_offload import OffloadPool
from vllm.v1.core.partial_block_index import PartialBlockIndex
from vllm.v1.core.sched.output import SchedulerOutput, SharedTokens
from vllm.v1.request import Request


@dataclass
class PrefixCacheStats:
    """Prompt tokens looked up in the prefix cache, and found there; blocks copied to the host's memory and back."""

    num_queried_tokens: int = 0
    num_hit_tokens: int = 0
    num_swapped_out_blocks: int = 0
    num_swapped_in_blocks: int = 0


class CachedPrefix(NamedTuple):
    """What need not be computed of a request's beginning."""

    blocks: list[int | None]  # whole blocks on the device; None: on the host alone, a block for it is still to be had
    on_host: list[bytes]  # the content hashes of those, in order
    num_tokens: int = 0  # in those blocks and in the part of one
    part_of: int | None = None  # the block that the tokens beyond the whole ones are to be copied from
    shared_with: str | None = None  # instead of that: the request that computes them in the step being scheduled


class _Unwritten(NamedTuple):
    """A block of a request that the step being scheduled writes, up to these tokens."""

    request: Request
    number: int  # among the request's blocks
    block_id: int
    token_ids: list[int]


class KVCacheManager:
    """Gives requests blocks and takes them back.

    Full blocks are registered by content when they are scheduled, not after the step: within a step every
    layer writes all keys and values before any attention reads, so a request admitted later in the same step
    may share them. `blocks_filled_by` names the blocks to unregister should that step not happen.

    Where the cached prefix ends inside a block, the request gets a copy of a block that begins as its own does, if one
    was written by an earlier step: `block_copies` (block, its copy) happen before any of the step's blocks is written.
    If the same step computes it from its beginning, what both have in common is written to both: `shared_tokens`.

    With host blocks, content that leaves the device goes there, be it of a preempted request or of a prefix that
    nobody wanted for long, and is found there. `swap_out` (device block, host block) and `swap_in` (host block, device
    block) are the copies that the step being scheduled begins with, all of the former first.
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        enable_caching: bool,
        max_idle_tokens: int | None = None,
        num_host_blocks: int = 0,
        shares_parts: bool = True,
    ) -> None:
        self.block_size = block_size
        self.enable_caching = enable_caching
        self.host = OffloadPool(num_host_blocks) if enable_caching and num_host_blocks else None
        max_evictable_blocks = None if max_idle_tokens is None else max_idle_tokens // block_size
        self.pool = BlockPool(num_blocks, max_evictable_blocks, None if self.host is None else self._evicted)
        self.swap_out: list[tuple[int, int]] = []
        self.swap_in: list[tuple[int, int]] = []
        self.block_copies: list[tuple[int, int]] = []
        self._shares_parts = shares_parts
        self.shared_tokens: list[SharedTokens] = []
        self._unwritten: list[_Unwritten] = []
        # Of these, the blocks that the step writes from their beginning, and whose they are.
        self._whole = PartialBlockIndex()
        self._owners: dict[int, str] = {}
        self.stats = PrefixCacheStats()
        self._blocks: dict[str, list[int]] = {}
        self._num_registered: dict[str, int] = {}  # leading blocks that were offered to the cache

    @property
    def usage(self) -> float:
        """Share of the blocks that are owned, in [0, 1]."""
        return 1 - self.pool.num_free / self.pool.num_blocks

    def blocks_of(self, request_id: str) -> list[int]:
        """The request's blocks, in order."""
        return self._blocks.get(request_id, [])

    def find_prefix(self, request: Request) -> CachedPrefix:
        """The longest cached prefix. At least the last token is left to compute, or there would be no logits to sample
        from. Where prompt positions are still to be read, the prefix ends before the first block that has keys and
        values but no hidden states, as all have on the host."""
        if not self.enable_caching or request.sampling_params.skip_reading_prefix_cache:
            return CachedPrefix([], [])
        limit = (request.num_tokens - 1) // self.block_size
        blocks: list[int | None] = []
        on_host: list[bytes] = []
        first_row, host = request.next_prompt_row, self.host
        for content_hash in extend_block_hashes(request, self.block_size)[:limit]:
            block_id = self.pool.find(content_hash)
            if block_id is None and (host is None or host.find(content_hash) is None):
                break
            is_read = first_row is not None and first_row < (len(blocks) + 1) * self.block_size
            if is_read and (block_id is None or not self.pool.has_hidden(block_id)):
                break
            if block_id is None:
                on_host.append(content_hash)
            blocks.append(block_id)
        num_whole = len(blocks) * self.block_size
        if self._shares_parts:
            (written, num_written), (unwritten, num_unwritten) = self._find_parts(request, len(blocks))
            if num_unwritten > num_written:
                owner = self._owners[unwritten]
                return CachedPrefix(blocks, on_host, num_whole + num_unwritten, shared_with=owner)
            if num_written:
                return CachedPrefix(blocks, on_host, num_whole + num_written, part_of=written)
        return CachedPrefix(blocks, on_host, num_whole)

    def _find_parts(self, request: Request, index: int) -> tuple[tuple[int, int], tuple[int, int]]:
        """Blocks that begin as the request's block `index` does, and with how many tokens, maybe 0: one that is
        written, and one that the step is to write. None of the tokens may be a position that is still to be read:
        hidden states are not copied."""
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
        return request.block_hashes[index - 1] if index else root_hash(request.cache_salt)

    def admit(self, request: Request, prefix: CachedPrefix, num_new_tokens: int) -> bool:
        """Give a request without blocks its cached prefix and room for `num_new_tokens` more; False, and
        nothing done, when there is no room."""
        num_cached = len(prefix.blocks)
        on_device = [block_id for block_id in prefix.blocks if block_id is not None]
        num_tokens = prefix.num_tokens + num_new_tokens
        num_missing = self._num_blocks_for(num_tokens) - len(on_device)
        taken_back = sum(map(self.pool.is_evictable, on_device))
        if num_missing > self.pool.num_free - taken_back:
            return False
        self.pool.share(on_device)
        if prefix.on_host:
            self._blocks[request.request_id] = self._bring_back(prefix, num_missing)
        else:
            self._blocks[request.request_id] = on_device + self.pool.allocate(num_missing)
        if prefix.part_of is not None:
            own = self._blocks[request.request_id][num_cached]
            # The block may have been free, and just been handed out for its own copy.
            if own != prefix.part_of:
                self.block_copies.append((prefix.part_of, own))
        if prefix.shared_with is not None:
            start = num_cached * self.block_size
            shared = SharedTokens(prefix.shared_with, request.request_id, start, prefix.num_tokens - start)
            self.shared_tokens.append(shared)
        request.hidden_from = request.next_prompt_row
        self._num_registered[request.request_id] = num_cached
        if self.enable_caching:
            # After a preemption the prefix holds the request's own work; counting it would flatter the cache.
            if request.num_preemptions == 0:
                self.stats.num_queried_tokens += request.num_tokens
                self.stats.num_hit_tokens += prefix.num_tokens
            self._register(request, num_tokens, prefix.num_tokens)
            self._note_tail(request, num_tokens, prefix.num_tokens)
        return True

    def grow(self, request: Request, num_new_tokens: int) -> list[int] | None:
        """Room for `num_new_tokens` beyond the computed ones: the blocks added (maybe none), or None without
        room."""
        num_tokens = request.num_computed_tokens + num_new_tokens
        if num_new_tokens == 1 and num_tokens % self.block_size > 1:
            # Most decodes: the last block neither begins nor becomes full.
            return []
        blocks = self._blocks[request.request_id]
        missing = self.num_missing_blocks(request, num_new_tokens)
        if missing > self.pool.num_free:
            return None
        added = self.pool.allocate(missing) if missing > 0 else []
        blocks += added
        if self.enable_caching and num_tokens // self.block_size > self._num_registered[request.request_id]:
            self._register(request, num_tokens, request.num_computed_tokens)
        if self.enable_caching and num_new_tokens > 1:
            self._note_tail(request, num_tokens, request.num_computed_tokens)
        return added

    def num_missing_blocks(self, request: Request, num_new_tokens: int) -> int:
        """Blocks that the request lacks for `num_new_tokens` beyond the computed ones; none if not above 0."""
        num_blocks = self._num_blocks_for(request.num_computed_tokens + num_new_tokens)
        return num_blocks - len(self._blocks[request.request_id])

    def register_known(self, request: Request) -> None:
        """Tokens of the request have become known after a step had begun to compute them: its blocks that are full of
        known tokens can be found from now on."""
        num_known = min(request.num_computed_tokens, len(request.token_ids))
        if self.enable_caching and num_known // self.block_size > self._num_registered[request.request_id]:
            self._register(request, num_known, num_known)

    def blocks_filled_by(self, request: Request, num_computed_before: int) -> list[int]:
        """The request's blocks that are not full until the step begun at `num_computed_before` is done."""
        blocks = self._blocks.get(request.request_id, [])
        return blocks[num_computed_before // self.block_size :]

    def forget_content(self, block_ids: list[int]) -> None:
        """These blocks were registered for content that was never written."""
        for block_id in block_ids:
            self.pool.unregister(block_id)

    def forget_broken_content(self, block_ids: list[int]) -> None:
        """What was written to these blocks is not to be trusted, and no copy of it either."""
        for block_id in block_ids:
            content_hash = self.pool.unregister(block_id)
            if content_hash is not None and self.host is not None:
                self.host.forget(content_hash)

    def finish_step(self, step: SchedulerOutput) -> None:
        """Give the step its copies and what it shares; the next one starts without any, and finds parts of the blocks
        that this one writes."""
        for request, number, block_id, token_ids in self._unwritten:
            # A preempted request has lost its blocks again, unwritten.
            if self.blocks_of(request.request_id)[number : number + 1] == [block_id]:
                self.pool.partial_blocks.add(block_id, self._parent(request, number), token_ids)
        self._unwritten.clear()
        self._whole.clear()
        self._owners.clear()
        step.block_copies, self.block_copies = self.block_copies, []
        step.shared_tokens, self.shared_tokens = self.shared_tokens, []
        step.swap_out, step.swap_in = self.swap_out, self.swap_in
        if self.host is not None:
            self.host.end_step()
            self.stats.num_swapped_out_blocks += len(self.swap_out)
            self.stats.num_swapped_in_blocks += len(self.swap_in)
            self.swap_out, self.swap_in = [], []

    def forget_swaps(self, swap_out: list[tuple[int, int]], swap_in: list[tuple[int, int]]) -> None:
        """A step's copies may not have been made."""
        for _, host_block in swap_out:
            assert self.host is not None
            self.host.forget_block(host_block)
        self.forget_content([block_id for _, block_id in swap_in])

    def free(self, request: Request) -> None:
        """Take the request's blocks back. The tail goes first, so that the common beginning stays longest."""
        blocks = self._blocks.pop(request.request_id, None)
        self._num_registered.pop(request.request_id, None)
        if blocks:
            self.pool.release(reversed(blocks))

    def reset_prefix_cache(self) -> bool:
        """Forget all cached content, the host's too; False, and nothing done, while any block is owned."""
        if not self.pool.reset():
            return False
        if self.host is not None:
            self.host.reset()
            self.swap_out.clear()
        return True

    def _evicted(self, block_id: int, content_hash: bytes) -> None:
        assert self.host is not None
        host_block = self.host.store(content_hash)
        if host_block is not None:
            self.swap_out.append((block_id, host_block))

    def _bring_back(self, prefix: CachedPrefix, num_missing: int) -> list[int]:
        """`num_missing` new blocks behind those on the device or between them, and the copies to the first of them."""
        assert self.host is not None
        # The end of a prefix is of use to the fewest requests, so it is to go first again.
        for content_hash in reversed(prefix.on_host):
            self.host.use(content_hash)
        new = iter(self.pool.allocate(num_missing))
        blocks = []
        on_host = iter(prefix.on_host)
        for block_id in prefix.blocks:
            if block_id is None:
                content_hash, block_id = next(on_host), next(new)
                host_block = self.host.find(content_hash)
                assert host_block is not None
                self.swap_in.append((host_block, block_id))
                self.pool.register(block_id, content_hash)
            blocks.append(block_id)
        return [*blocks, *new]

    def _register(self, request: Request, num_tokens: int, begin: int) -> None:
        """The request's full blocks up to `num_tokens` can be found from now on; the step computes it from `begin`."""
        hashes = extend_block_hashes(request, self.block_size)
        blocks = self._blocks[request.request_id]
        full = min(num_tokens // self.block_size, len(hashes))
        for index in range(self._num_registered[request.request_id], full):
            self.pool.register(blocks[index], hashes[index], request.keeps_hidden(index, self.block_size))
            if self._shares_parts:
                tokens = request.token_ids[index * self.block_size : (index + 1) * self.block_size]
                self._note(_Unwritten(request, index, blocks[index], tokens), begin)
        self._num_registered[request.request_id] = full

    def _note_tail(self, request: Request, num_tokens: int, begin: int) -> None:
        """The block that a prompt's part up to `num_tokens` ends in may lend what it has, though it is not full."""
        index = num_tokens // self.block_size
        tokens = request.token_ids[index * self.block_size : num_tokens]
        if self._shares_parts and tokens:
            block_id = self._blocks[request.request_id][index]
            self._note(_Unwritten(request, index, block_id, tokens), begin)

    def _note(self, block: _Unwritten, begin: int) -> None:
        self._unwritten.append(block)
        if block.number * self.block_size >= begin:
            self._whole.add(block.block_id, self._parent(block.request, block.number), block.token_ids)
            self._owners[block.block_id] = block.request.request_id

    def _num_blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)
