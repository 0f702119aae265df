"""A store of blocks in the scheduler: what a step fills is written behind it, and a request that begins with what is
there waits until it is read."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from itertools import chain, repeat, takewhile
from typing import Any, NamedTuple

import numpy as np

from vllm.logger import init_logger, warn_once
from vllm.utils.kv_store.blocks import BlockStore
from vllm.utils.kv_store.segment import Bytes
from vllm.v1.core.block_pool import HASH_BYTES
from vllm.v1.core.content_names import ContentNames
from vllm.v1.core.guests import SchedulerGuest
from vllm.v1.core.kv_cache_groups import hidden_key, is_hidden, is_state, state_key
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.features.broken_prompts.scheduler import BrokenPrompts
from vllm.v1.features.kv_store.rates import Rates
from vllm.v1.features.states.scheduler import StepStates
from vllm.v1.messages import EngineCoreOutput
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request

logger = init_logger(__name__)

# How long a step that has nothing else to do waits for a read, which wakes it, and for a write, in seconds.
_PATIENCE, _WRITE_PATIENCE = 0.02, 0.001
# How long an answer waits until its prompt's blocks are written that another engine is to read, in seconds.
_HAND_ON_SECONDS = 10.0
# Steps of fewer tokens are slower by token than prompts are.
_LEAST_STEP_TOKENS = 64


_NO_BYTES = np.zeros(0, dtype=np.uint8)


class FilledBlock(NamedTuple):
    """A block that a step fills, or a snapshot."""

    key: bytes
    block_id: int
    request_id: str


@dataclass
class StepBlocks:
    """A step's copies: those into the cache before its forward pass, and those out of it afterwards."""

    back: list[tuple[Bytes, int]] = field(default_factory=list)  # (uint8 [size], block), the latter distinct
    hidden_back: list[tuple[Bytes, int]] = field(default_factory=list)  # final hidden states of some of them
    states_back: list[tuple[Bytes, int]] = field(default_factory=list)  # (uint8 [size], snapshot), before any is loaded
    out: list[FilledBlock] = field(default_factory=list)
    hidden_out: list[FilledBlock] = field(default_factory=list)
    states_out: list[FilledBlock] = field(default_factory=list)
    hidden_bytes: int = 0  # the size of each of `hidden_back`, once their bytes are left out
    has_stages: bool = False

    def sendable(self) -> StepBlocks:
        """The same without the bytes that rank 0 gives to the others of its stage; other stages get theirs so."""
        names = ("hidden_back",) if self.has_stages else ("back", "hidden_back", "states_back")
        back = {name: getattr(self, name) for name in names}
        bare: dict[str, Any] = {name: [(_NO_BYTES, number) for _, number in each] for name, each in back.items()}
        return replace(self, **bare, hidden_bytes=self.hidden_back[0][0].nbytes if self.hidden_back else 0)


class CopiedBlocks(NamedTuple):
    """The bytes of a step's `out`, uint8 [N, size], with their checksums where they are known, of its `hidden_out` and
    of its `states_out`."""

    rows: Bytes
    sums: list[int] | None
    hidden: list[Bytes]
    states: list[Bytes]


class Staged:
    """A block in memory, on its way from the store into the cache."""

    def __init__(self, block: Bytes) -> None:
        self.block, self.owners = block, set[Read]()


class Read:
    """Content that requests wait for, and then begin with.

    Attributes:
        prefix: the keys of all that they begin with.
        keys: of what is read, and then staged, of it.
        parts: the reads that give it.
        requests: by their ids, until they have begun or ended.
    """

    def __init__(self, prefix: list[bytes], keys: list[bytes], parts: set[Future[dict[bytes, Bytes]]]) -> None:
        self.prefix, self.keys, self.parts = prefix, keys, parts
        self.requests: dict[str, Request] = {}


class HeldEnd(NamedTuple):
    """The end of a prompt with which another engine goes on."""

    output: EngineCoreOutput
    number: int  # of all that was given to the store, up to the prompt's last block
    until: float  # on the monotonic clock


class StoredPrefixes(SchedulerGuest):
    """Reads for requests that are not queued yet, so that nothing is promised that may be lost; and gives what steps
    have filled to the store."""

    def __init__(
        self,
        scheduler: Any,
        store: BlockStore,
        keeps_salted: bool,
        most_staged_bytes: int,
        has_stages: bool = False,
    ) -> None:
        """
        Args:
            keeps_salted: whether blocks of requests with a cache_salt are written, too.
            most_staged_bytes: of blocks that have been read and are not in the cache yet.
            has_stages: whether the model is split by layers.
        """
        self._has_stages = has_stages
        self.store, self._scheduler = store, scheduler
        self._kv, self._keeps_salted, self._requests = scheduler.kv, keeps_salted, scheduler.requests
        self._keeps_hidden = scheduler.cache_config.caches_hidden_states
        self._keeps_states = scheduler.cache_config.num_states is not None
        self._most_staged_bytes = most_staged_bytes
        self._block_size = scheduler.kv.block_size
        self._staged: dict[bytes, Staged] = {}
        self._reads: dict[str, Read] = {}  # for requests that are not queued yet
        self._reads_by_end: dict[bytes, Read] = {}  # the same, by the last key of the prefix
        self._done: dict[str, Read] = {}  # what is staged, for those that are not admitted yet
        self._pending: dict[bytes, Future[dict[bytes, Bytes]]] = {}  # by the keys of what is read for them
        self._threads: ThreadPoolExecutor | None = None
        self._rates = Rates()
        self._step_began = 0.0
        # While `holds` is to answer for all of the store: the store's names of content hashes.
        self._looking: dict[bytes, bytes] | None = None
        self._content = ContentNames(self._block_size)
        self._handed_on: set[str] = set()  # requests with which another engine goes on
        self._held: deque[HeldEnd] = deque()
        self._is_off = False
        self._num_noted: dict[str, int] = {}  # leading blocks of a running request that need no further note
        self._num_back = self._num_queried_tokens = self._num_hit_tokens = 0

    # -- reading ------------------------------------------------------------------------------------------------------

    def prepares(self, request: Request) -> bool:
        if self._held:
            # An earlier request of this name may have been aborted.
            self._held = deque(each for each in self._held if each.output.request_id != request.request_id)
        if (request.kv_transfer_params or {}).get("do_remote_decode"):
            self._handed_on.add(request.request_id)
        if self._is_off or not self._is_kept(request):
            return False
        names = self._content.names(request)
        prefix, num_blocks = self._prefix_to_read(request, names)
        if num_blocks <= 0:
            return False
        read = self._reads_by_end.get(prefix[-1])
        if read is None or read.prefix != prefix:
            read = self._begin_read(prefix, num_blocks * self._block_size, names)
        if read is None:
            return False
        read.requests[request.request_id] = request
        self._reads[request.request_id] = read
        return True

    def _prefix_to_read(self, request: Request, names: dict[bytes, bytes]) -> tuple[list[bytes], int]:
        """The keys of the longest prefix that the store makes possible, and how many blocks it has more than the one
        that is there without the store."""
        self._num_queried_tokens += request.num_tokens
        most = (request.num_tokens - 1) // self._block_size
        num_cached = count = self._kv.find_prefix(request).num_blocks
        if count < most and (count := self._look(request, names)) < most and self.store.refresh():
            count = self._look(request, names)
        keys = self._kv.keys_of_prefix(request, count)
        if count and self._keeps_states:
            keys.append(state_key(request.block_hashes[count - 1]))
        self.store.note_use([_stored(key, names) for key in keys] if names else keys)
        return keys, count - num_cached

    def _begin_read(self, prefix: list[bytes], num_tokens: int, names: dict[bytes, bytes]) -> Read | None:
        """Read what the engine lacks of a prefix, by which so many tokens less are computed; None: that is faster, or
        there is no memory for it."""
        missing = {key for key in prefix if not self._kv.is_cached(key)}
        # Hidden states that are on the device come with their blocks.
        keys = [key for key in prefix if key in missing and (key[:HASH_BYTES] in missing or not is_hidden(key))]
        # Others may wait for the same.
        new = {key: _stored(key, names) for key in keys if key not in self._pending}
        if not keys or not self._should_read(list(new.values()), num_tokens):
            return None
        if self._threads is None:
            self._threads = ThreadPoolExecutor(1, "kv-store-reads")
        if new:
            future = self._threads.submit(self._read, new)
            future.add_done_callback(self._scheduler.rest.wake)
            self._pending |= dict.fromkeys(new, future)
        read = self._reads_by_end[prefix[-1]] = Read(prefix, keys, {self._pending[key] for key in keys})
        return read

    def _read(self, stored: dict[bytes, bytes]) -> dict[bytes, Bytes]:
        """The blocks of the engine's keys, by those of the store."""
        began = time.perf_counter()
        try:
            blocks = self.store.read(list(stored.values()))
        except Exception as error:
            # Such as for want of memory.
            warn_once(logger, "kv_store: blocks could not be read, and are computed: %r", error)
            return {}
        self._rates.reading.note(sum(block.nbytes for block in blocks.values()), time.perf_counter() - began)
        return {key: blocks[own] for key, own in stored.items() if own in blocks}

    def _look(self, request: Request, names: dict[bytes, bytes]) -> int:
        """The blocks of the longest prefix that the store makes possible, as far as is known."""
        self._looking = names
        try:
            return self._kv.find_prefix(request).num_blocks
        finally:
            self._looking = None

    def _should_read(self, stored: list[bytes], num_tokens: int) -> bool:
        """Whether there is memory for these blocks, and reading them takes less time than computing so many tokens."""
        size, staged = self.store.size(stored), sum(each.block.nbytes for each in self._staged.values())
        # Blocks of one engine have about the same size.
        before = len(self._pending) * size / max(len(stored), 1)
        has_room = staged + before + size <= self._most_staged_bytes
        return has_room and (not stored or self._rates.should_read(size, num_tokens, before))

    def prepared(self, is_idle: bool) -> Sequence[tuple[Request, str | None]]:
        """In order of their arrival."""
        if self._held:
            self._end_held()
        if not self._reads:
            if is_idle and self._held:
                self._scheduler.rest(_WRITE_PATIENCE)
            return ()
        done = self._done_reads()
        if is_idle and not done:
            self._scheduler.rest(_PATIENCE)
            done = self._done_reads()
        if not done:
            return ()
        self._done |= {name: self._reads.pop(name) for name in done}
        for read in {self._done[name]: None for name in done}:
            self._stage(read)
        self._forget_pending()
        return [(self._done[name].requests[name], None) for name in done]

    def _done_reads(self) -> list[str]:
        return [name for name, each in self._reads.items() if all(part.done() for part in each.parts)]

    def _stage(self, read: Read) -> None:
        if self._is_off:
            return
        blocks = {key: block for part in read.parts for key, block in part.result().items()}
        found = [key for key in read.keys if key in blocks]
        # A block of several groups has as many keys, which begin with its hash.
        num_blocks = len({key[:HASH_BYTES] for key in found})
        self._num_hit_tokens += num_blocks * self._block_size * len(read.requests)
        for key in found:
            if (staged := self._staged.get(key)) is None:
                staged = self._staged[key] = Staged(blocks[key])
            staged.owners.add(read)

    def _forget_pending(self) -> None:
        reads = {*self._reads.values()}
        self._reads_by_end = {read.prefix[-1]: read for read in reads}
        needed = {key for read in reads for key in read.keys}
        for key in self._pending.keys() - needed:
            del self._pending[key]

    def ended(self, request: Request) -> None:
        read = self._reads.pop(request.request_id, None)
        if read is not None:
            del read.requests[request.request_id]
            if not read.requests:
                self._forget_pending()
        self._release(request.request_id)
        self._num_noted.pop(request.request_id, None)
        self._content.forget(request)

    def _release(self, request_id: str) -> None:
        """The request has begun with what was read for it, or has ended."""
        read = self._done.pop(request_id, None)
        if read is None:
            return
        del read.requests[request_id]
        for key in read.keys if not read.requests else ():
            if (staged := self._staged.get(key)) is not None:
                staged.owners.discard(read)
                if not staged.owners:
                    del self._staged[key]

    def num_held(self, keys: Sequence[bytes]) -> int:
        names = self._looking
        if names is None:
            return len(list(takewhile(self._staged.__contains__, keys)))
        return self.store.num_leading([_stored(key, names) for key in keys] if names else keys)

    def holds(self, key: bytes) -> bool:
        if key in self._staged:
            return True
        is_there = self._looking is not None and _stored(key, self._looking) in self.store
        return is_there and (self._keeps_hidden or not is_hidden(key))

    def bring(self, key: bytes, block_id: int, step: SchedulerOutput) -> bool:
        staged = self._staged.get(key)
        if staged is None:
            return False
        blocks = step.parts.made(StepBlocks)
        blocks.has_stages = self._has_stages
        back = blocks.hidden_back if is_hidden(key) else blocks.states_back if is_state(key) else blocks.back
        back.append((staged.block, block_id))
        return True

    # -- writing ------------------------------------------------------------------------------------------------------

    def _is_kept(self, request: Request) -> bool:
        """Whether what computes the request is what the store's name says, and it may be kept."""
        may_be_kept = not request.given_salt or self._keeps_salted
        return may_be_kept and self._content.has_name(request)

    def computes(self, request: Request, begin: int, end: int, step: SchedulerOutput) -> None:
        name = request.request_id
        if name not in self._num_noted:
            # It has just been admitted, and what it was read for has been brought.
            self._release(name)
        # Blocks may become full by tokens that are known only after the step that computes them.
        first = self._num_noted.setdefault(name, begin // self._block_size)
        full = min(end, len(request.token_ids)) // self._block_size
        if full <= first or self._is_off or not self._is_kept(request):
            return
        self._num_noted[name] = full
        names = self._content.names(request)
        for engine_key, block_id in self._kv.filled_blocks(request, first, full):
            key = _stored(engine_key, names)
            if not self.store.will_have(key):
                blocks = step.parts.made(StepBlocks)
                (blocks.hidden_out if is_hidden(key) else blocks.out).append(FilledBlock(key, block_id, name))
        states = step.parts.of(StepStates)
        if states is not None and states.saves and states.saves[-1][0] == name:
            # The step saves the state at its end.
            key = _stored(state_key(request.block_hashes[end // self._block_size - 1]), names)
            if not self.store.will_have(key):
                snapshot = FilledBlock(key, states.saves[-1][1], name)
                step.parts.made(StepBlocks).states_out.append(snapshot)

    def preempted(self, request: Request, step: SchedulerOutput) -> None:
        # Tokens that no one has drawn may be dropped, and others may follow.
        self._num_noted.pop(request.request_id, None)
        self._content.begins_anew(request)
        if (blocks := step.parts.of(StepBlocks)) is not None:
            for out in (blocks.out, blocks.hidden_out, blocks.states_out):
                out[:] = [each for each in out if each.request_id != request.request_id]

    def fill(self, step: SchedulerOutput) -> None:
        self._step_began = time.perf_counter()
        if (blocks := step.parts.of(StepBlocks)) is not None:
            self._num_back += len(blocks.back)

    def update(self, step: SchedulerOutput, output: ModelRunnerOutput, outputs: list[EngineCoreOutput]) -> None:
        if step.total_num_scheduled_tokens >= _LEAST_STEP_TOKENS:
            self._rates.computing.note(step.total_num_scheduled_tokens, time.perf_counter() - self._step_began)
        blocks, copied = step.parts.of(StepBlocks), output.parts.of(CopiedBlocks)
        if blocks is not None and copied is not None and not self._is_off:
            self._write(blocks, copied, output)
        if self._handed_on:
            self._hold(outputs)

    def _write(self, blocks: StepBlocks, copied: CopiedBlocks, output: ModelRunnerOutput) -> None:
        rows = chain(copied.rows, copied.hidden, copied.states)
        filled = [*blocks.out, *blocks.hidden_out, *blocks.states_out]
        sums = chain(copied.sums or (), repeat(None))
        # Keys and values may be as corrupted as the logits.
        unsound = {*output.errors}
        if (broken := output.parts.of(BrokenPrompts)) is not None:
            unsound |= broken.req_ids
        self.store.write_all(
            [
                (each.key, row, total)
                for each, row, total in zip(filled, rows, sums, strict=False)
                if each.request_id not in unsound and not self.store.will_have(each.key)
            ]
        )

    def _hold(self, outputs: list[EngineCoreOutput]) -> None:
        """Keep the ends of prompts that another engine goes on with until their blocks are on disk, as upstream's
        proxies ask an engine that computes prompts."""
        ended = {each.request_id for each in outputs if each.finish_reason is not None} & self._handed_on
        now = time.monotonic()
        ends = [each for each in outputs if each.request_id in ended]
        self._held += [HeldEnd(each, self.store.num_given, now + _HAND_ON_SECONDS) for each in ends]
        outputs[:] = [each for each in outputs if each.request_id not in ended]
        self._handed_on.intersection_update(self._requests)

    def _end_held(self) -> None:
        """Give the ends whose time has come."""
        while self._held:
            first = self._held[0]
            is_written = self.store.flush(0.0, first.number)
            if not is_written and time.monotonic() < first.until:
                return
            if is_written:
                first.output.kv_transfer_params = {"do_remote_prefill": True, "do_remote_decode": False}
            self._scheduler.refused.append(first.output)
            self._held.popleft()

    def transfers(self) -> bool:
        return bool(self._held)

    def broken(self, request: Request, keys: list[bytes]) -> None:
        if self._is_kept(request):
            names = self._content.names(request)
            stored = [_stored(key, names) for each in keys for key in (each, hidden_key(each))]
            stored += [_stored(state_key(each), names) for each in request.block_hashes]
            self.store.take_back([key for key in stored if self.store.will_have(key)])

    def weights_changed(self) -> None:
        self._is_off = True

    def reset_cache(self) -> None:
        self._staged.clear()

    def closed(self) -> None:
        self.store.close()

    def counts(self) -> dict[str, Any]:
        return {
            "num_stored_blocks": self.store.num_written,
            "num_loaded_blocks": self._num_back,
            "num_external_queried_tokens": self._num_queried_tokens,
            "num_external_hit_tokens": self._num_hit_tokens,
        }


def _stored(key: bytes, names: dict[bytes, bytes]) -> bytes:
    """The store's key of content that the engine knows by `key`."""
    if not names:
        return key
    content_hash = key[:HASH_BYTES]
    return names.get(content_hash, content_hash) + key[HASH_BYTES:]
