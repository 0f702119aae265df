"""Events of the prefix cache: which blocks it has, and which it has no more."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any, Protocol

from vllm.v1.core.block_pool import HASH_BYTES
from vllm.v1.core.guests import SchedulerGuest
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.features.broken_prompts.scheduler import BrokenPrompts
from vllm.v1.features.kv_events.messages import AllBlocksCleared, BlockRemoved, BlockStored, KVEventBatch
from vllm.v1.messages import EngineCoreOutput
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request


class Publisher(Protocol):
    """Takes batches of events."""

    def publish(self, batch: KVEventBatch) -> None: ...

    def close(self) -> None: ...


class StepNews(list[BlockStored]):
    """The blocks that a step fills or finds."""


class CacheEvents(SchedulerGuest):
    """Tells of the first KV group's blocks: others have the same tokens. A block is told of once a step has filled it,
    and again when it is back after it was gone."""

    def __init__(self, scheduler: Any, publisher: Publisher, medium: str, rank: int) -> None:
        """`medium`: where blocks are; `rank`: of the replica."""
        self._kv, self._publisher = scheduler.kv, publisher
        self._medium, self._rank = medium, rank
        self._told: set[bytes] = set()
        self._num_seen: dict[str, int] = {}  # leading blocks of a running request that were looked at
        self._gone: list[bytes] = []
        self._is_cleared = False

    def computes(self, request: Request, begin: int, end: int, step: SchedulerOutput) -> None:
        first = self._num_seen.get(request.request_id, 0)
        full = min(end, len(request.token_ids)) // self._kv.block_size
        if full <= first:
            return
        self._num_seen[request.request_id] = full
        hashes = request.block_hashes
        new = [index for index in range(first, min(full, len(hashes))) if hashes[index] not in self._told]
        news = step.parts.made(StepNews)
        for index in new:
            self._told.add(hashes[index])
            if news and index and news[-1].block_hashes[-1] == hashes[index - 1]:
                news[-1].block_hashes.append(hashes[index])
                news[-1].token_ids.extend(self._tokens(request, index))
                continue
            adapter = request.lora_request
            news.append(
                BlockStored(
                    [hashes[index]],
                    hashes[index - 1] if index else None,
                    self._tokens(request, index),
                    self._kv.block_size,
                    None if adapter is None else adapter.lora_int_id,
                    self._medium,
                    None if adapter is None else adapter.lora_name,
                )
            )

    def _tokens(self, request: Request, index: int) -> list[int]:
        size = self._kv.block_size
        return request.token_ids[index * size : (index + 1) * size]

    def take(self, key: bytes, block_id: int, step: SchedulerOutput) -> bool:
        self._lose([key])
        return False

    def broken(self, request: Request, keys: list[bytes]) -> None:
        self._lose(keys)
        self._publish([])

    def preempted(self, request: Request, step: SchedulerOutput) -> None:
        self._num_seen.pop(request.request_id, None)
        self._check(step)

    def ended(self, request: Request) -> None:
        self._num_seen.pop(request.request_id, None)

    def discarded(self, step: SchedulerOutput) -> None:
        for event in step.parts.of(StepNews) or ():
            self._told.difference_update(event.block_hashes)
        step.parts.pop(StepNews, None)

    def _check(self, step: SchedulerOutput) -> None:
        """Take back what is not there: what a preempted request was to fill, or what is broken."""
        kept = StepNews()
        for event in step.parts.of(StepNews) or ():
            if all(self._kv.pool.find(each) is not None for each in event.block_hashes):
                kept.append(event)
            else:
                self._told.difference_update(event.block_hashes)
        step.parts.add(kept)

    def _lose(self, keys: list[bytes]) -> None:
        gone = [key for key in keys if len(key) == HASH_BYTES and key in self._told]
        self._told.difference_update(gone)
        self._gone += gone

    def reset_cache(self) -> None:
        self._told.clear()
        self._gone.clear()
        self._is_cleared = True
        self._publish([])

    def update(self, step: SchedulerOutput, output: ModelRunnerOutput, outputs: list[EngineCoreOutput]) -> None:
        if output.parts.of(BrokenPrompts) is not None:
            self._check(step)
        self._publish(step.parts.of(StepNews) or [])

    def _publish(self, stored: Sequence[BlockStored]) -> None:
        events: list[Any] = [AllBlocksCleared()] if self._is_cleared else []
        if self._gone:
            events.append(BlockRemoved([*self._gone], self._medium))
        events += stored
        self._is_cleared, self._gone = False, []
        if events:
            self._publisher.publish(KVEventBatch(time.time(), events, self._rank))

    def closed(self) -> None:
        self._publisher.close()
