"""Finds a block that begins with given tokens, for cached prefixes that end inside a block."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from itertools import islice

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
