"""The kinds of KV groups: which blocks of a request the layers of a kind need.

Latent layers are a group as those of whole keys and values are; a recurrent state needs no blocks, and is a guest that
limits the prefixes which are found.
"""

from __future__ import annotations

from collections.abc import Callable

from vllm.config.cache import Chunks, Window
from vllm.v1.core.block_pool import HASH_BYTES

Blocks = tuple[list[int], ...]
"""Block ids of a request in each KV group."""

_HIDDEN = b"hidden"
_STATE = b"state"

NO_BLOCK = -1
"""In place of a block that a group no longer needs or never needed."""


def hidden_key(key: bytes) -> bytes:
    """The key of the final hidden states that lie beside content of the first group, where a guest keeps them."""
    return key + _HIDDEN


def is_hidden(key: bytes) -> bool:
    """Whether it is one of these."""
    return len(key) == HASH_BYTES + len(_HIDDEN) and key.endswith(_HIDDEN)


def state_key(content_hash: bytes) -> bytes:
    """The key of the recurrent state after content, where a guest keeps it."""
    return content_hash + _STATE


def is_state(key: bytes) -> bool:
    """Whether it is one of these."""
    return len(key) == HASH_BYTES + len(_STATE) and key.endswith(_STATE)


class FullGroup:
    """Every token sees all before it: all blocks are needed, and a prefix of a cached prefix is one."""

    window: Window = None

    def __init__(self, number: int, block_size: int) -> None:
        """`number`: its place among the groups."""
        self._suffix = number.to_bytes(2, "little") if number else b""
        self._block_size = block_size

    def key(self, content_hash: bytes) -> bytes:
        """The key that content of the group's layers is registered by: its hash, with the group's number after the
        first."""
        return content_hash + self._suffix

    def keys(self, hashes: list[bytes]) -> list[bytes]:
        """The keys of these contents."""
        return [self.key(each) for each in hashes] if self._suffix else hashes

    def first_needed(self, num_computed: int) -> int:
        """The first block that the query at position `num_computed`, or a later one, sees a token of."""
        return 0

    def most_blocks(self, num_tokens: int, step_tokens: int) -> int:
        """The most blocks that a request of `num_tokens` has at once, where a step computes at most `step_tokens`."""
        return -(-num_tokens // self._block_size)

    def longest_prefix(self, hashes: list[bytes], count: int, is_cached: Callable[[bytes], bool]) -> int:
        """The most leading blocks, at most `count`, of which all that later queries need are cached."""
        for index in range(count):
            if not is_cached(self.key(hashes[index])):
                return index
        return count


class WindowGroup(FullGroup):
    """A token sees so many, itself included: blocks that no later one sees are released, and only the last blocks of
    a cached prefix are needed."""

    def __init__(self, number: int, block_size: int, size: int) -> None:
        super().__init__(number, block_size)
        self.window: Window = size
        self._num_seen = size

    def first_needed(self, num_computed: int) -> int:
        return max(num_computed - self._num_seen + 1, 0) // self._block_size

    def most_blocks(self, num_tokens: int, step_tokens: int) -> int:
        seen = self._num_seen - 1 + min(step_tokens, num_tokens)
        return min(-(-seen // self._block_size) + 1, super().most_blocks(num_tokens, step_tokens))

    def longest_prefix(self, hashes: list[bytes], count: int, is_cached: Callable[[bytes], bool]) -> int:
        while count:
            first, index = self.first_needed(count * self._block_size), count - 1
            while index >= first and is_cached(self.key(hashes[index])):
                index -= 1
            if index < first:
                break
            # Shorter prefixes end before the missing block, and need others.
            count = index
        return count


class ChunkGroup(WindowGroup):
    """A token sees those of its chunk: it is a window that jumps."""

    def __init__(self, number: int, block_size: int, chunks: Chunks) -> None:
        super().__init__(number, block_size, chunks.size)
        self.window = chunks

    def first_needed(self, num_computed: int) -> int:
        return num_computed // self._num_seen * self._num_seen // self._block_size


def make_groups(windows: tuple[Window, ...], block_size: int) -> tuple[FullGroup, ...]:
    """The groups whose layers see these."""

    def make(number: int, window: Window) -> FullGroup:
        if window is None:
            return FullGroup(number, block_size)
        if isinstance(window, Chunks):
            return ChunkGroup(number, block_size, window)
        return WindowGroup(number, block_size, window)

    return tuple(make(number, window) for number, window in enumerate(windows))


def blocks_needed(num_tokens: int, step_tokens: int, windows: tuple[Window, ...], block_size: int) -> int:
    """The most blocks that a request of `num_tokens` has at once in groups with these windows, where a step computes
    at most `step_tokens`."""
    return sum(group.most_blocks(num_tokens, step_tokens) for group in make_groups(windows, block_size))
