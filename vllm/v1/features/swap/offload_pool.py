"""Blocks of host memory that hold copies of KV blocks, for swap-in instead of recomputation."""

from __future__ import annotations

from collections import OrderedDict


class OffloadPool:
    """Host blocks 0 .. num_blocks - 1 by content hash; the least recently used one is evicted first. A step's copies to
    the host precede those from there; so a block that the step being scheduled copies to or from is not evicted."""

    def __init__(self, num_blocks: int) -> None:
        if num_blocks < 1:
            raise ValueError(f"num_blocks must be at least 1, got {num_blocks}")
        self.num_blocks = num_blocks
        self._uncached = list(range(num_blocks - 1, -1, -1))  # a stack: memory that was never touched comes last
        self._block_of: OrderedDict[bytes, int] = OrderedDict()  # oldest use first
        self._of_this_step: set[bytes] = set()

    @property
    def usage(self) -> float:
        """Share of the blocks that hold content, in [0, 1]."""
        return len(self._block_of) / self.num_blocks

    def find(self, content_hash: bytes) -> int | None:
        """The block that holds this content, if any."""
        return self._block_of.get(content_hash)

    def use(self, content_hash: bytes) -> None:
        """Cached content is used in this step."""
        self._block_of.move_to_end(content_hash)
        self._of_this_step.add(content_hash)

    def store(self, content_hash: bytes) -> int | None:
        """The block to copy this content to; None: it is cached already, or this step uses all blocks."""
        if content_hash in self._block_of:
            self.use(content_hash)
            return None
        if self._uncached:
            block_id = self._uncached.pop()
        else:
            # Blocks that this step uses are at the end: if one comes first, there is nothing else.
            oldest = next(iter(self._block_of))
            if oldest in self._of_this_step:
                return None
            block_id = self._block_of.pop(oldest)
        self._block_of[content_hash] = block_id
        self._of_this_step.add(content_hash)
        return block_id

    def end_step(self) -> None:
        """The step is scheduled: all of its copies are known."""
        self._of_this_step.clear()

    def forget(self, content_hash: bytes) -> None:
        """Discard this content, if it is cached."""
        block_id = self._block_of.pop(content_hash, None)
        if block_id is not None:
            self._uncached.append(block_id)

    def forget_block(self, block_id: int) -> None:
        """Discard the block's content, if any: the copy to it failed."""
        for content_hash in [each for each, block in self._block_of.items() if block == block_id]:
            self.forget(content_hash)

    def reset(self) -> None:
        """Discard all content."""
        for content_hash in list(self._block_of):
            self.forget(content_hash)
