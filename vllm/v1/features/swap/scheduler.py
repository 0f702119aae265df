"""Host blocks in the scheduler: evicted content is copied there, found there, and copied back."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from vllm.v1.core.guests import SchedulerGuest
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.features.swap.offload_pool import OffloadPool
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
