"""The pool of KV blocks: owners, free blocks, blocks with cached content."""

from __future__ import annotations

import hashlib
from array import array
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from itertools import islice, takewhile

from vllm.v1.request import Request

_MOST_COMPARED = 16  # of the blocks that agree in the first token, the latest


class PartialBlockIndex:
    """The tokens of blocks, full or not, by the hash of the preceding content and the first token."""

    def __init__(self) -> None:
        self._groups: dict[tuple[bytes, int], dict[int, array[int]]] = {}
        self._group_of: dict[int, tuple[bytes, int]] = {}

    def add(self, block_id: int, parent: bytes, token_ids: Sequence[int]) -> None:
        """The block holds these tokens (not empty), after content of the hash `parent`."""
        self.discard(block_id)
        group = self._group_of[block_id] = parent, token_ids[0]
        self._groups.setdefault(group, {})[block_id] = array("q", token_ids)

    def discard(self, block_id: int) -> None:
        """Forget the block, if it is known."""
        group = self._group_of.pop(block_id, None)
        if group is not None:
            members = self._groups[group]
            del members[block_id]
            if not members:
                del self._groups[group]

    def clear(self) -> None:
        self._groups.clear()
        self._group_of.clear()

    def find(self, parent: bytes, token_ids: Sequence[int]) -> tuple[int, int]:
        """The block with the longest common prefix with `token_ids` (not empty), and its length; (-1, 0): none."""
        members = self._groups.get((parent, token_ids[0]), {})
        best, longest = -1, 0
        for block_id, content in islice(reversed(members.items()), _MOST_COMPARED):
            differs = (
                index for index, (own, other) in enumerate(zip(content, token_ids, strict=False)) if own != other
            )
            length = next(differs, min(len(content), len(token_ids)))
            if length > longest:
                best, longest = block_id, length
                if length == len(token_ids):
                    break
        return best, longest


HASH_BYTES = 16
"""The size of a block's content hash."""


def extend_block_hashes(request: Request, block_size: int) -> list[bytes]:
    """The content hashes of all full blocks of the request; computes the missing ones."""
    return hash_full_blocks(
        request.token_ids, block_size, request.cache_salt, request.block_hashes, request.content_number
    )


def hash_full_blocks(
    token_ids: list[int], block_size: int, cache_salt: str | None, known: list[bytes], content_number: int = 0
) -> list[bytes]:
    """Content hashes of all full blocks, in order; `known`, the leading ones, is extended in place. A hash covers the
    block's tokens and, by its key, all before them; it is HASH_BYTES of BLAKE2b, against constructed collisions."""
    num_full = len(token_ids) // block_size
    if len(known) < num_full:
        parent = known[-1] if known else root_hash(cache_salt, content_number)
        content = array("q", token_ids[len(known) * block_size : num_full * block_size]).tobytes()
        size = len(content) // (num_full - len(known))
        if known:
            known += _chain(content, size, parent)
        else:
            known += _latest.hashes(content, size, parent)
    return known


def _chain(content: bytes, size: int, parent: bytes) -> list[bytes]:
    """The hashes of `content`'s blocks of `size` bytes."""
    hashes = []
    for begin in range(0, len(content), size):
        parent = hashlib.blake2b(content[begin : begin + size], digest_size=HASH_BYTES, key=parent).digest()
        hashes.append(parent)
    return hashes


class _LatestContent:
    """The content that was hashed last from its beginning: most often the next one begins alike."""

    def __init__(self) -> None:
        self._known: tuple[int, bytes, bytes, list[bytes]] = (0, b"", b"", [])

    def hashes(self, content: bytes, size: int, root: bytes) -> list[bytes]:
        """The hashes of `content`'s blocks of `size` bytes, from the beginning on."""
        *of, before, known = self._known
        count, most = 0, min(len(content), len(before)) // size if of == [size, root] else 0
        while count < most:
            middle = (count + most + 1) // 2
            if content[size * count : size * middle] == before[size * count : size * middle]:
                count = middle
            else:
                most = middle - 1
        found = known[:count]
        found += _chain(content[size * count :], size, found[-1] if found else root)
        # One assignment, as engines may run in several threads.
        self._known = size, root, content, list(found)
        return found


_latest = _LatestContent()


def root_hash(salt: str | None, content_number: int = 0) -> bytes:
    """The key of a first block's hash; `content_number`: of what computes it, 0 = the model."""
    person = b"salt" + content_number.to_bytes(8, "big", signed=True)
    return hashlib.blake2b(
        (salt or "").encode("utf-8", "surrogatepass"), digest_size=HASH_BYTES, person=person
    ).digest()


class BlockPool:
    """Blocks 0 .. num_blocks - 1, by reference count.

    A free block may still hold content (evictable): it can be found by its hash until it is allocated again. Blocks
    without content are allocated first (latest freed first, so that memory never touched stays untouched), then
    evictable ones, least recently used first; with `max_evictable_blocks` (None = no limit) of these, the oldest comes
    before a block that was never allocated. `on_evict` gets each evicted block and its hash; the block holds the
    content until the step being scheduled writes there.
    """

    def __init__(self, num_blocks: int, max_evictable_blocks: int | None = None) -> None:
        if num_blocks < 1:
            raise ValueError(f"num_blocks must be at least 1, got {num_blocks}")
        self.num_blocks = num_blocks
        self._max_evictable_blocks = num_blocks if max_evictable_blocks is None else max_evictable_blocks
        self._num_touched = 0  # blocks from this id on were never allocated
        self.on_evict: Callable[[int, bytes], None] | None = None
        self.ref_counts = [0] * num_blocks
        self._uncached = list(range(num_blocks - 1, -1, -1))  # a stack: low ids come first
        self._evictable: OrderedDict[int, None] = OrderedDict()  # free, with content; oldest first
        self._hash_of: dict[int, bytes] = {}
        self._with_hidden: set[int] = set()  # blocks with the final hidden states of their tokens
        self._block_of: dict[bytes, int] = {}
        # Cached and partly filled blocks, until they are allocated for other content.
        self.partial_blocks = PartialBlockIndex()

    @property
    def num_free(self) -> int:
        """Blocks without an owner."""
        return len(self._uncached) + len(self._evictable)

    def find(self, content_hash: bytes) -> int | None:
        """The block that holds this content, if any."""
        return self._block_of.get(content_hash)

    def num_leading(self, content_hashes: Iterable[bytes]) -> int:
        """How many of these contents, up to the first that no block holds, there are."""
        return len(list(takewhile(self._block_of.__contains__, content_hashes)))

    def has_hidden(self, block_id: int) -> bool:
        """Whether the block has the final hidden states of its tokens."""
        return block_id in self._with_hidden

    def is_evictable(self, block_id: int) -> bool:
        return block_id in self._evictable

    def allocate(self, count: int) -> list[int]:
        """Allocate blocks, each with one owner; their old content is forgotten. RuntimeError: too few are free."""
        if count > self.num_free:
            raise RuntimeError(f"{count} blocks asked for, {self.num_free} free")
        blocks = []
        for _ in range(count):
            has_enough_evictable = len(self._evictable) >= max(self._max_evictable_blocks, 1)
            if self._uncached and not (self._uncached[-1] >= self._num_touched and has_enough_evictable):
                block_id = self._uncached.pop()
                self.partial_blocks.discard(block_id)
                self._num_touched = max(self._num_touched, block_id + 1)
            else:
                block_id, _ = self._evictable.popitem(last=False)
                content_hash = self._forget(block_id)
                if self.on_evict is not None:
                    self.on_evict(block_id, content_hash)
            self.ref_counts[block_id] = 1
            blocks.append(block_id)
        return blocks

    def share(self, block_ids: Iterable[int]) -> None:
        """Add an owner to each block, taking back those that are free."""
        for block_id in block_ids:
            if self.ref_counts[block_id] == 0:
                del self._evictable[block_id]
            self.ref_counts[block_id] += 1

    def release(self, block_ids: Iterable[int]) -> None:
        """Remove one owner from each block. Earlier ones in `block_ids` are evicted sooner."""
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
        """Cache an owned block. A second one of equal content is ignored, unless only it has hidden states."""
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
        """Forget the block's content; returns its hash, None if it was not registered."""
        self.partial_blocks.discard(block_id)
        if block_id not in self._hash_of:
            return None
        content_hash = self._forget(block_id)
        if block_id in self._evictable:
            del self._evictable[block_id]
            self._uncached.append(block_id)
        return content_hash

    def forget_evictable(self) -> None:
        """Forget the content of all free blocks."""
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
