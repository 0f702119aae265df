"""Which blocks each request owns; the prefix cache."""

from __future__ import annotations

from dataclasses import dataclass

from vllm.v1.core.block_pool import BlockPool, extend_block_hashes
from vllm.v1.request import Request


@dataclass
class PrefixCacheStats:
    """Prompt tokens looked up in the prefix cache, and found there."""

    num_queried_tokens: int = 0
    num_hit_tokens: int = 0


class KVCacheManager:
    """Gives requests blocks and takes them back.

    Full blocks are registered by content when they are scheduled, not after the step: within a step every
    layer writes all keys and values before any attention reads, so a request admitted later in the same step
    may share them. `blocks_filled_by` names the blocks to unregister should that step not happen.
    """

    def __init__(
        self, num_blocks: int, block_size: int, enable_caching: bool, max_idle_tokens: int | None = None
    ) -> None:
        self.block_size = block_size
        self.enable_caching = enable_caching
        self.pool = BlockPool(num_blocks, None if max_idle_tokens is None else max_idle_tokens // block_size)
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

    def find_prefix(self, request: Request) -> list[int]:
        """Blocks that hold the longest cached prefix. At least the last token is left to compute, or there
        would be no logits to sample from. Where prompt positions are still to be read, the prefix ends before
        the first block that has keys and values but no hidden states."""
        if not self.enable_caching:
            return []
        limit = (request.num_tokens - 1) // self.block_size
        blocks: list[int] = []
        first_row = request.next_prompt_row
        for content_hash in extend_block_hashes(request, self.block_size)[:limit]:
            block_id = self.pool.find(content_hash)
            if block_id is None:
                break
            is_read = first_row is not None and first_row < (len(blocks) + 1) * self.block_size
            if is_read and not self.pool.has_hidden(block_id):
                break
            blocks.append(block_id)
        return blocks

    def admit(self, request: Request, prefix: list[int], num_new_tokens: int) -> bool:
        """Give a request without blocks its cached prefix and room for `num_new_tokens` more; False, and
        nothing done, when there is no room."""
        total = self._num_blocks_for(len(prefix) * self.block_size + num_new_tokens)
        taken_back = sum(map(self.pool.is_reusable, prefix))
        if total - len(prefix) > self.pool.num_free - taken_back:
            return False
        self.pool.share(prefix)
        self._blocks[request.request_id] = prefix + self.pool.allocate(total - len(prefix))
        request.hidden_from = request.next_prompt_row
        self._num_registered[request.request_id] = len(prefix)
        if self.enable_caching:
            # After a preemption the prefix holds the request's own work; counting it would flatter the cache.
            if request.num_preemptions == 0:
                self.stats.num_queried_tokens += request.num_tokens
                self.stats.num_hit_tokens += len(prefix) * self.block_size
            self._register(request, len(prefix) * self.block_size + num_new_tokens)
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
            self._register(request, num_tokens)
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
            self._register(request, num_known)

    def blocks_filled_by(self, request: Request, num_computed_before: int) -> list[int]:
        """The request's blocks that are not full until the step begun at `num_computed_before` is done."""
        blocks = self._blocks.get(request.request_id, [])
        return blocks[num_computed_before // self.block_size :]

    def forget_content(self, block_ids: list[int]) -> None:
        """These blocks were registered for content that was never written."""
        for block_id in block_ids:
            self.pool.unregister(block_id)

    def free(self, request: Request) -> None:
        """Take the request's blocks back. The tail goes first, so that the common beginning stays longest."""
        blocks = self._blocks.pop(request.request_id, None)
        self._num_registered.pop(request.request_id, None)
        if blocks:
            self.pool.release(reversed(blocks))

    def reset_prefix_cache(self) -> bool:
        """Forget all cached content; False while any block is owned."""
        return self.pool.reset()

    def _register(self, request: Request, num_tokens: int) -> None:
        hashes = extend_block_hashes(request, self.block_size)
        blocks = self._blocks[request.request_id]
        full = min(num_tokens // self.block_size, len(hashes))
        for index in range(self._num_registered[request.request_id], full):
            self.pool.register(blocks[index], hashes[index], request.keeps_hidden(index, self.block_size))
        self._num_registered[request.request_id] = full

    def _num_blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)
