"""Blocks of a store in the worker: copied out of the cache after a step has written them, and into it before one."""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from vllm.distributed.stages import get_stage
from vllm.ops.block_copies import copy_blocks_, row_parts, take_blocks_
from vllm.ops.cpu_kernels import packs_for
from vllm.utils.kv_store.segment import Bytes
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.features.hidden_cache.runner import HiddenCache
from vllm.v1.features.kv_store.scheduler import CopiedBlocks, StepBlocks
from vllm.v1.features.states.runner import StatePools, States
from vllm.v1.worker.gpu.guests import CacheSizes, Completion, RunnerGuest, StepOutcome
from vllm.v1.worker.gpu.input_batch import InputBatch

_TURN_BYTES = 64 * 2**20
"""Memory through which blocks pass on their way into the cache."""

_MOST_FREE = 2
"""Pieces of memory that are kept for further steps."""

_NOTHING = 8
"""The size of a block where no layer has keys and values: the store's entries have a size."""


class _Memory:
    """Memory for blocks on their way to the store, which is used again once they are written: to touch new pages takes
    longer than to copy."""

    def __init__(self) -> None:
        self._free: deque[memoryview] = deque(maxlen=_MOST_FREE)

    def take(self, count: int, size: int) -> Tensor:
        """uint8 [count, size], of any content; the memory is free when neither this nor a part of it is used."""
        memory = self._free.pop() if self._free else memoryview(b"")
        num_bytes = max(count * size, 1)
        if memory.nbytes < num_bytes:
            memory = np.empty(num_bytes, dtype=np.uint8).data
        # Parts of this array keep it, and not the memory alone.
        whole = np.frombuffer(memory, dtype=np.uint8)
        weakref.finalize(whole, self._free.append, memory).atexit = False
        return torch.from_numpy(whole[: count * size].reshape(count, size))


class _Place(NamedTuple):
    """The place of a stage's bytes in a rank's share of a block or state."""

    begin: int
    size: int


class StoredBlocks(RunnerGuest):
    """A block's bytes are those of its keys and values in all layers, one after the other, and of what guests keep
    there; a state's are its parts. Of several ranks each has a share of both: rank 0 gathers them, and gives each its
    own back. Of several stages each appends its layers' bytes to those of the stages before it, which come over the
    link behind the step's rows; and every rank gets all of what is read with the step. Final hidden states are the same
    on all ranks of the last stage."""

    def __init__(self, runner: Any) -> None:
        self._runner, self._stage = runner, get_stage()
        self._places: tuple[_Place, _Place] | None = None  # in a block and in a state, once they are known
        self._copied: CopiedBlocks | None = None
        self._memory = _Memory()

    def reset(self, sizes: CacheSizes) -> None:
        self._copied = None
        if not sizes.num_blocks or sizes.is_scratch or self._places is not None:
            return
        pools = _state_pools(self._runner)
        own = torch.tensor([block_bytes(self._runner), 0 if pools is None else pools.state_bytes])
        before = torch.zeros_like(own) if self._stage.is_first else self._stage.receive(torch.empty_like(own))
        if not self._stage.is_last:
            self._stage.send(before + own)
        of_block, of_state = zip(before.tolist(), own.tolist(), strict=True)
        self._places = _Place(*of_block), _Place(*of_state)

    def begin(self, step: SchedulerOutput) -> None:
        # Before a state is loaded from where these go.
        blocks, pools = step.parts.of(StepBlocks), _state_pools(self._runner)
        if blocks is None or pools is None:
            return
        for state, snapshot in blocks.states_back:
            pools.put_bytes(snapshot, self._own_shares([state], self._of_state)[0])

    def before_forward(self, step: SchedulerOutput, batch: InputBatch) -> None:
        blocks = step.parts.of(StepBlocks)
        if blocks is None:
            return
        if blocks.hidden_back and self._stage.is_last:
            size = blocks.hidden_bytes or blocks.hidden_back[0][0].nbytes
            for block, block_id in blocks.hidden_back:
                self._hidden.blocks(size)[block_id] = self._from_rank_0([block], size)[0]
        count = max(_TURN_BYTES // self._of_block.size, 1)
        for begin in range(0, len(blocks.back), count):
            turn = blocks.back[begin : begin + count]
            rows = self._own_shares([block for block, _ in turn], self._of_block)
            self._copy_in(rows, [each for _, each in turn])

    def after_forward(self, step: SchedulerOutput, batch: InputBatch, hidden: Tensor) -> None:
        blocks = step.parts.of(StepBlocks)
        if blocks is None or not (blocks.out or blocks.hidden_out or blocks.states_out):
            return
        rows, sums = self._copy_out([each.block_id for each in blocks.out])
        # The guests that keep these come before this one: they have written this step's.
        pools, nothing = _state_pools(self._runner), torch.empty(0, dtype=torch.uint8)
        states = [nothing if pools is None else pools.bytes_of(each.block_id) for each in blocks.states_out]
        shares = [self._after_others(rows, self._of_block)]
        shares += [self._after_others(each[None], self._of_state) for each in states]
        if not self._stage.is_last:
            for share in shares:
                self._stage.send(share)
            return
        gathered = [self._all_shares(each) for each in shares]
        if self._runner.group.rank == 0:
            final = [self._hidden.blocks()[each.block_id].numpy().copy() for each in blocks.hidden_out]
            self._copied = CopiedBlocks(gathered[0], sums, final, [each[0] for each in gathered[1:]])

    def after_sample(self, batch: InputBatch, hidden: Tensor) -> Completion | None:
        copied, self._copied = self._copied, None
        if copied is None:
            return None

        def complete(outcome: StepOutcome) -> None:
            outcome.output.parts.add(copied)

        return complete

    @property
    def _hidden(self) -> HiddenCache:
        hidden: HiddenCache | None = self._runner.guest(HiddenCache)
        assert hidden is not None
        return hidden

    @property
    def _of_block(self) -> _Place:
        assert self._places is not None
        return self._places[0]

    @property
    def _of_state(self) -> _Place:
        assert self._places is not None
        return self._places[1]

    def _after_others(self, own: Tensor, place: _Place) -> Tensor:
        """This stage's bytes of N blocks, uint8 [N, size], after those of the stages before it."""
        if self._stage.is_first:
            return own
        rows = self._memory.take(len(own), place.begin + place.size)
        rows[:, : place.begin] = self._stage.receive(self._memory.take(len(own), place.begin))
        rows[:, place.begin :] = own
        return rows

    def _all_shares(self, own: Tensor) -> Bytes:
        """This rank's shares of N blocks, uint8 [N, size], as rank 0 gives all of them to the store, [N, ranks *
        size]; elsewhere something else."""
        gathered = self._runner.group.gather(own)
        whole = own if gathered is None else gathered.transpose(0, 1).flatten(1)
        found: Bytes = whole.numpy()
        return found

    def _own_shares(self, blocks: Sequence[Bytes], place: _Place) -> Tensor:
        """The inverse, from rank 0's N blocks: what this rank of this stage has of them, uint8 [N, size]."""
        group = self._runner.group
        if self._stage.size > 1:
            whole = _rows_of(blocks)
        else:
            whole = self._from_rank_0(blocks, place.size * group.world_size)
        begin = whole.shape[1] // group.world_size * group.rank + place.begin
        return whole[:, begin : begin + place.size].contiguous()

    def _from_rank_0(self, blocks: Sequence[Bytes], size: int) -> Tensor:
        """Rank 0's N blocks, uint8 [N, size], on every rank."""
        group = self._runner.group
        if group.rank:
            return group.broadcast(torch.empty((len(blocks), size), dtype=torch.uint8))
        return group.broadcast(_rows_of(blocks))

    def _copy_out(self, block_ids: list[int]) -> tuple[Tensor, list[int] | None]:
        """This rank's shares of blocks, uint8 [N, size], and the blocks' checksums where these are all of them."""
        copies, rows = self._runner.block_copies, self._memory.take(len(block_ids), self._of_block.size)
        if not copies.caches or not block_ids:
            return rows.zero_(), None
        if self._stage.size > 1 or self._runner.group.world_size > 1:
            copy_blocks_(copies.ids(block_ids), torch.arange(len(rows)), copies.parts, row_parts(rows, copies.parts))
            return rows, None
        sums = take_blocks_(rows, copies.ids(block_ids), copies.parts)
        return rows, sums.numpy().view(np.uint64).tolist()

    def _copy_in(self, rows: Tensor, block_ids: list[int]) -> None:
        copies = self._runner.block_copies
        if copies.caches:
            copy_blocks_(torch.arange(len(rows)), copies.ids(block_ids), row_parts(rows, copies.parts), copies.parts)


def _rows_of(blocks: Sequence[Bytes]) -> Tensor:
    """Blocks as uint8 [N, size], without a copy where they lie one after the other, as those that were read at once."""
    first, size = blocks[0], blocks[0].nbytes
    places = [each.__array_interface__["data"][0] for each in blocks]
    if all(each.base is first.base for each in blocks) and places == [places[0] + i * size for i in range(len(blocks))]:
        return torch.from_numpy(np.lib.stride_tricks.as_strided(first, (len(blocks), size), (size, 1)))
    return torch.stack([torch.from_numpy(block) for block in blocks])


def _state_pools(runner: Any) -> StatePools | None:
    states = runner.guest(States)
    return None if states is None else states.pools


def block_bytes(runner: Any) -> int:
    """The size of this rank's share of a block."""
    return sum(cache.shape[1] * cache.element_size() for cache in runner.block_copies.caches) or _NOTHING


class Layout(NamedTuple):
    """The parts of a rank's share of a block and of a state, of each the dtype and the shape; the stage's layers, where
    other ones would lie otherwise (None: all stages' parts lie as those of one would); and what computes them."""

    num_ranks: int
    of_block: list[Any]
    of_state: list[Any]
    layers: tuple[int, int] | None
    cpu: str


def layout_of(worker: Any) -> Layout:
    """A rank's Layout."""
    runner, own = worker.model_runner, worker.stage.layers
    kept = [group for guest in runner.guests for group in guest.in_blocks()]
    found = {cache.data_ptr(): cache for group in (*runner.kv_caches, *kept) for cache in group}
    pools = _state_pools(runner)
    blocks = [[str(cache.dtype), list(cache.shape[1:])] for cache in found.values()]
    # Groups have memory in common; of states and blocks either may be nothing.
    is_plain = own is None or (pools is None and len(runner.kv_layout.windows) == 1)
    layers = None if is_plain else (own.start, own.stop)
    cpu = f"{packs_for()} {torch.backends.cpu.get_cpu_capability()}"
    return Layout(runner.group.world_size, blocks, [] if pools is None else pools.layout, layers, cpu)


def whole_layout(of_ranks: Sequence[Layout]) -> list[Any]:
    """The layout of a block and a state of all stages. `of_ranks`: of all ranks, the last stage's first."""
    num_ranks = of_ranks[0].num_ranks
    stages = of_ranks[::num_ranks][::-1]
    blocks = [part for stage in stages for part in stage.of_block]
    states = [part for stage in stages for part in stage.of_state]
    layers = [stage.layers for stage in stages if stage.layers is not None]
    kinds = [each.cpu for each in of_ranks]
    # Where machines differ, bits depend on which layers each has.
    by = kinds[:1] if len(set(kinds)) == 1 else [kinds, [len(each.of_block) for each in of_ranks]]
    return [num_ranks, blocks, states, layers, by]
