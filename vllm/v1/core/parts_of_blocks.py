"""Cached prefixes that end inside a block: which blocks begin with given tokens, written or to be written by a step."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from vllm.v1.core.block_pool import BlockPool, PartialBlockIndex, root_hash
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
