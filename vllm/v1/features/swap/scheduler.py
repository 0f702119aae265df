"""Host blocks in the scheduler: evicted content is copied there, found there, and copied back."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field
from typing import Any

from vllm.v1.core.guests import SchedulerGuest
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.request import Request


@dataclass
class StepSwaps:
    """A step's copies: those to the host before it copies between blocks, those from there afterwards."""

    out: list[tuple[int, int]] = field(default_factory=list)  # (device block, host block), each at most once
    back: list[tuple[int, int]] = field(default_factory=list)  # (host block, device block), the latter distinct


class Swaps(SchedulerGuest):
    """Takes what is evicted from the device's blocks, and brings it back."""

    def __init__(self, scheduler: Any) -> None:
        self.host = OffloadPool(scheduler.cache_config.num_host_blocks)
        self._num_out = self._num_back = 0

    def take(self, key: bytes, block_id: int, step: SchedulerOutput) -> bool:
        host_block = self.host.store(key)
        if host_block is not None:
            step.parts.made(StepSwaps).out.append((block_id, host_block))
        return self.host.find(key) is not None

    def holds(self, key: bytes) -> bool:
        return self.host.find(key) is not None

    def keep(self, keys: list[bytes]) -> None:
        for key in keys:
            if self.holds(key):
                self.host.use(key)

    def bring(self, key: bytes, block_id: int, step: SchedulerOutput) -> bool:
        host_block = self.host.find(key)
        if host_block is None:
            return False
        step.parts.made(StepSwaps).back.append((host_block, block_id))
        return True

    def fill(self, step: SchedulerOutput) -> None:
        self.host.end_step()
        if (swaps := step.parts.of(StepSwaps)) is not None:
            self._num_out += len(swaps.out)
            self._num_back += len(swaps.back)

    def discarded(self, step: SchedulerOutput) -> None:
        if (swaps := step.parts.of(StepSwaps)) is not None:
            for _, host_block in swaps.out:
                self.host.forget_block(host_block)

    def broken(self, request: Request, keys: list[bytes]) -> None:
        for key in keys:
            self.host.forget(key)

    def reset_cache(self) -> None:
        self.host.reset()

    def counts(self) -> dict[str, Any]:
        return {
            "num_swapped_out_blocks": self._num_out,
            "num_swapped_in_blocks": self._num_back,
            "host_cache_usage": self.host.usage,
        }


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
