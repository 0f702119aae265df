"""The pool of KV blocks: who owns which, which are free, and which hold content worth finding again."""

from __future__ import annotations

import hashlib
from array import array
from collections import OrderedDict
from collections.abc import Callable, Iterable

from vllm.v1.core.partial_block_index import PartialBlockIndex
from vllm.v1.request import Request


def extend_block_hashes(request: Request, block_size: int) -> list[bytes]:
    """Hash the request's full blocks that have not been hashed yet; returns all of them."""
    return hash_full_blocks(request.token_ids, block_size, request.cache_salt, request.block_hashes)


def hash_full_blocks(token_ids: list[int], block_size: int, cache_salt: str | None, known: list[bytes]) -> list[bytes]:
    """Content hashes of all full blocks, in order: `known`, the first of them, is extended by what it lacks.

    A block's is made of its tokens and, through its predecessor's hash as the key, of everything before them. 16 bytes
    of BLAKE2b, so that two contents that meet are not a matter of luck that an attacker can work on.
    """
    num_full = len(token_ids) // block_size
    if len(known) < num_full:
        parent = known[-1] if known else root_hash(cache_salt)
        content = array("q", token_ids[len(known) * block_size : num_full * block_size]).tobytes()
        size = len(content) // (num_full - len(known))
        for begin in range(0, len(content), size):
            parent = hashlib.blake2b(content[begin : begin + size], digest_size=16, key=parent).digest()
            known.append(parent)
    return known


def root_hash(salt: str | None) -> bytes:
    """What stands for the predecessor of a first block."""
    return hashlib.blake2b((salt or "").encode("utf-8", "surrogatepass"), digest_size=16, person=b"salt").digest()


class BlockPool:
    """Blocks 0 .. num_blocks - 1, by reference count.

    A free block may still hold content under a hash: it can be taken back by that content until it is handed
    out for another. Blocks without content are handed out first (latest freed first, so that memory never
    touched stays untouched), then those with content (evictable), least recently used first. While there are
    `max_evictable_blocks` of these, the oldest comes before a block that was never handed out.
    """

    def __init__(
        self,
        num_blocks: int,
        max_evictable_blocks: int | None = None,
        on_evict: Callable[[int, bytes], None] | None = None,
    ) -> None:
        """
        Args:
            max_evictable_blocks: None = as many as there are.
            on_evict: told of each block whose content is given up for another, and of that content's hash. The block
                holds it until the step being scheduled writes there.
        """
        if num_blocks < 1:
            raise ValueError(f"num_blocks must be at least 1, got {num_blocks}")
        self.num_blocks = num_blocks
        self._max_evictable_blocks = num_blocks if max_evictable_blocks is None else max_evictable_blocks
        self._num_touched = 0  # blocks from this id on were never handed out
        self._on_evict = on_evict
        self.ref_counts = [0] * num_blocks
        self._uncached = list(range(num_blocks - 1, -1, -1))  # a stack: low ids come first
        self._evictable: OrderedDict[int, None] = OrderedDict()  # free, with content; oldest first
        self._hash_of: dict[int, bytes] = {}
        self._with_hidden: set[int] = set()  # blocks whose tokens' final hidden states are kept, too
        self._block_of: dict[bytes, int] = {}
        # Cached blocks, and those that are partly filled, until they are handed out for other content.
        self.partial_blocks = PartialBlockIndex()

    @property
    def num_free(self) -> int:
        """Blocks that nobody owns."""
        return len(self._uncached) + len(self._evictable)

    @property
    def num_cached(self) -> int:
        """Blocks that can be found by content."""
        return len(self._block_of)

    def find(self, content_hash: bytes) -> int | None:
        """The block that holds this content, if any."""
        return self._block_of.get(content_hash)

    def has_hidden(self, block_id: int) -> bool:
        """Whether the final hidden states of the block's tokens are kept beside their keys and values."""
        return block_id in self._with_hidden

    def is_evictable(self, block_id: int) -> bool:
        """Whether the block is free and holds content."""
        return block_id in self._evictable

    def allocate(self, count: int) -> list[int]:
        """Hand out `count` blocks, each with one owner; content that they held is forgotten.

        Raises:
            RuntimeError: fewer are free.
        """
        if count > self.num_free:
            raise RuntimeError(f"{count} blocks asked for, {self.num_free} free")
        blocks = []
        for _ in range(count):
            if self._uncached and not (self._uncached[-1] >= self._num_touched and self._has_enough_evictable):
                block_id = self._uncached.pop()
                self.partial_blocks.discard(block_id)
                self._num_touched = max(self._num_touched, block_id + 1)
            else:
                block_id, _ = self._evictable.popitem(last=False)
                content_hash = self._forget(block_id)
                if self._on_evict is not None:
                    self._on_evict(block_id, content_hash)
            self.ref_counts[block_id] = 1
            blocks.append(block_id)
        return blocks

    @property
    def _has_enough_evictable(self) -> bool:
        return len(self._evictable) >= max(self._max_evictable_blocks, 1)

    def share(self, block_ids: Iterable[int]) -> None:
        """Add an owner to each block, taking back those that are free."""
        for block_id in block_ids:
            if self.ref_counts[block_id] == 0:
                del self._evictable[block_id]
            self.ref_counts[block_id] += 1

    def release(self, block_ids: Iterable[int]) -> None:
        """Take one owner from each block. Earlier ones in `block_ids` are handed out again sooner."""
        for block_id in block_ids:
            count = self.ref_counts[block_id] - 1
            if count < 0:
                raise RuntimeError(f"block {block_id} was released more often than owned")
            self.ref_counts[block_id] = count
            if count == 0:
                if block_id in self._hash_of:
                    self._evictable[block_id] = None
                else:
                    self._uncached.append(block_id)

    def register(self, block_id: int, content_hash: bytes, has_hidden: bool = False) -> None:
        """Make an owned block findable by its content. A second block of equal content stays unregistered, unless
        hidden states are kept for it and not for the first."""
        first = self._block_of.get(content_hash)
        if first is not None and first != block_id and has_hidden and first not in self._with_hidden:
            self.unregister(first)
            first = None
        if first is None and block_id not in self._hash_of:
            self._block_of[content_hash] = block_id
            self._hash_of[block_id] = content_hash
            if has_hidden:
                self._with_hidden.add(block_id)

    def unregister(self, block_id: int) -> bytes | None:
        """The block does not hold what it was registered for: the hash of that, None if it was not registered."""
        self.partial_blocks.discard(block_id)
        if block_id not in self._hash_of:
            return None
        content_hash = self._forget(block_id)
        if block_id in self._evictable:
            del self._evictable[block_id]
            self._uncached.append(block_id)
        return content_hash

    def forget_evictable(self) -> None:
        """Forget the content of blocks that nobody owns."""
        for block_id in (*self._evictable, *self._uncached):
            self.unregister(block_id)

    def reset(self) -> bool:
        """Forget all content; False, and nothing done, while any block is owned."""
        if self.num_free != self.num_blocks:
            return False
        while self._evictable:
            self._uncached.append(self._evictable.popitem()[0])
        self._hash_of.clear()
        self._block_of.clear()
        self._with_hidden.clear()
        self.partial_blocks.clear()
        return True

    def _forget(self, block_id: int) -> bytes:
        content_hash = self._hash_of.pop(block_id)
        del self._block_of[content_hash]
        self._with_hidden.discard(block_id)
        self.partial_blocks.discard(block_id)
        return content_hash
