"""Collectives, over torch.distributed and over shared memory, on ranks that are threads."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from thread_ranks import ThreadRanks

from vllm.distributed import one_shot
from vllm.distributed.communicator import Communicator, PeerLostError, split_vocab
from vllm.distributed.process_group import DeviceCommunicator
from vllm.distributed.shared_memory import SharedMemoryCommunicator, make_links

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.int32, torch.int64, torch.uint8)
# One value, an odd number, and more than a slot of shared memory holds.
SIZES = (0, 1, 577, 300_001)


@pytest.fixture(params=[(2, False), (3, False), (2, True), (3, True)], ids=str, scope="module")
def ranks(request: pytest.FixtureRequest) -> Iterator[ThreadRanks]:
    ranks = ThreadRanks(*request.param)
    yield ranks
    ranks.close()


def values(rank: int, size: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Small integers, whose sums every dtype holds exactly."""
    return torch.randint(0, 20, (size,), generator=torch.Generator().manual_seed(rank)).to(dtype)


def on_all(ranks: ThreadRanks, call: Callable[[Communicator], torch.Tensor | None]) -> list[torch.Tensor | None]:
    return ranks.run(lambda rank: call(ranks.groups[rank]))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("size", SIZES)
def test_all_reduce(ranks: ThreadRanks, size: int, dtype: torch.dtype) -> None:
    whole = torch.stack([values(rank, size, torch.int64) for rank in range(len(ranks.groups))])
    for got in on_all(ranks, lambda group: group.all_reduce(values(group.rank, size, dtype))):
        assert torch.equal(got, whole.sum(0).to(dtype))


@pytest.mark.parametrize("size", SIZES)
def test_gathers_and_broadcast(ranks: ThreadRanks, size: int) -> None:
    whole = torch.stack([values(rank, size) for rank in range(len(ranks.groups))])
    for got in on_all(ranks, lambda group: group.all_gather(values(group.rank, size))):
        assert torch.equal(got, whole)
    for dst in range(len(ranks.groups)):
        gathered = on_all(ranks, lambda group, dst=dst: group.gather(values(group.rank, size), dst))
        assert [got is not None for got in gathered] == [rank == dst for rank in range(len(ranks.groups))]
        assert torch.equal(gathered[dst], whole)
        for got in on_all(ranks, lambda group, dst=dst: group.broadcast(values(group.rank, size), dst)):
            assert torch.equal(got, whole[dst])


def test_shapes_stay_and_any_stride_is_taken(ranks: ThreadRanks) -> None:
    def columns(group: Communicator) -> torch.Tensor:
        return values(group.rank, 60).view(3, 4, 5)[:, :, 1]

    expected = torch.stack([columns(group) for group in ranks.groups])
    for got in on_all(ranks, lambda group: group.all_reduce(columns(group))):
        assert torch.equal(got, expected.sum(0))
    for got in on_all(ranks, lambda group: group.all_gather(columns(group))):
        assert torch.equal(got, expected)


def test_what_is_handed_over_is_counted(ranks: ThreadRanks) -> None:
    group = ranks.groups[1]
    num_bytes, num_calls, total = dict(group.num_bytes), dict(group.num_calls), group.total_calls
    on_all(ranks, lambda group: group.all_reduce(torch.ones(3, 5)))
    on_all(ranks, lambda group: group.gather(torch.ones(7, dtype=torch.int64)))
    assert group.num_bytes["all_reduce"] - num_bytes.get("all_reduce", 0) == 3 * 5 * 4
    assert group.num_bytes["gather"] - num_bytes.get("gather", 0) == 7 * 8
    assert group.num_calls["all_reduce"] - num_calls.get("all_reduce", 0) == 1
    assert group.total_calls - total == 2
    assert not group.is_waiting


def test_a_sum_has_the_same_bits_wherever_it_stands() -> None:
    """In shared memory; a row must not depend on the rest of its batch."""
    ranks = ThreadRanks(3, shared=True)
    rows = [torch.randn(64, 33, generator=torch.Generator().manual_seed(rank)) for rank in range(3)]
    whole, *others = on_all(ranks, lambda group: group.all_reduce(rows[group.rank].clone()))
    assert all(torch.equal(whole, other) for other in others)
    for first, count in ((0, 1), (17, 5), (63, 1)):
        part, *_ = on_all(
            ranks, lambda group, own=slice(first, first + count): group.all_reduce(rows[group.rank][own].clone())
        )
        assert torch.equal(part, whole[first : first + count])
    ranks.close()


@pytest.mark.parametrize("call", ["all_reduce", "all_gather", "gather", "broadcast"])
def test_who_waits_for_a_rank_that_ends_is_told(call: str) -> None:
    links = make_links(2)
    group = SharedMemoryCommunicator(links[0])
    links[1].close()
    with pytest.raises(PeerLostError, match="rank 0 lost the others"):
        getattr(group, call)(torch.ones(3))
    assert not group.is_waiting


def test_links_leave_nothing_open() -> None:
    before = len(os.listdir("/proc/self/fd"))
    groups = [SharedMemoryCommunicator(each) for each in make_links(3)]
    assert len(os.listdir("/proc/self/fd")) > before
    del groups
    assert len(os.listdir("/proc/self/fd")) == before


def test_one_rank_moves_nothing() -> None:
    group, tensor = Communicator(), torch.ones(3)
    assert group.all_reduce(tensor) is tensor
    assert torch.equal(group.all_gather(tensor), tensor[None])
    assert not group.num_calls


@pytest.mark.parametrize(("vocab_size", "world_size"), [(10, 1), (10, 3), (199, 4), (3, 4), (151_936, 8)])
def test_the_vocabulary_is_cut_into_nearly_equal_ranges(vocab_size: int, world_size: int) -> None:
    ranges = split_vocab(vocab_size, world_size)
    assert [token_id for own in ranges for token_id in own] == list(range(vocab_size))
    assert max(map(len, ranges)) - min(map(len, ranges)) <= 1


class Nccl:
    """Notes what it is asked for."""

    def __init__(self) -> None:
        self.options: dict[str, Any] = {}

    def name(self) -> str:
        return "nccl"

    def rank(self) -> int:
        return 0

    def size(self) -> int:
        return 2

    def __getattr__(self, name: str) -> Callable[..., Any]:
        def collective(*args: Any) -> SimpleNamespace:
            self.options[name] = args[-1]
            return SimpleNamespace(wait=lambda: None)

        return collective


def test_on_a_device_collectives_run_on_the_current_stream() -> None:
    """A graph that is captured there holds them, and no other stream is waited for."""
    nccl = Nccl()
    group = Communicator(nccl)
    for call in (group.all_reduce, group.all_gather, group.gather, group.broadcast):
        call(torch.zeros(3))
    assert sorted(nccl.options) == ["_allgather_base", "allreduce", "broadcast", "gather"]
    assert not any(options.asyncOp for options in nccl.options.values())


class SharedMemory:
    """Stands for Torch's symmetric memory, of ranks that are threads: what one_shot.py uses of it."""

    def __init__(self, world_size: int, broken_rank: int | None = None) -> None:
        self._buffers: dict[int, torch.Tensor] = {}
        self._barrier = threading.Barrier(world_size, timeout=60)
        self._broken_rank = broken_rank
        self._rank = threading.local()

    def set_group_info(self, name: str, rank: int, world_size: int, store: Any) -> None:
        self._rank.value = rank

    def empty_strided_p2p(self, size: Any, stride: Any, dtype: Any, device: Any, name: str) -> torch.Tensor:
        if self._rank.value == self._broken_rank:
            raise RuntimeError("no peer access")
        return torch.empty_strided(size, stride, dtype=dtype)

    def rendezvous(self, buffer: torch.Tensor, name: str) -> None:
        self._buffers[self._rank.value] = buffer

    def one_shot_all_reduce_out(self, own: torch.Tensor, op: str, name: str, out: torch.Tensor) -> torch.Tensor:
        self._barrier.wait()
        parts = [buffer[: own.nbytes].view(own.dtype) for _, buffer in sorted(self._buffers.items())]
        out.copy_(torch.stack(parts).sum(0))
        self._barrier.wait()
        return out


@pytest.mark.parametrize("broken_rank", [None, 1])
def test_small_sums_of_devices_take_one_kernel(monkeypatch: pytest.MonkeyPatch, broken_rank: int | None) -> None:
    memory, store = SharedMemory(2, broken_rank), dist.HashStore()
    monkeypatch.setattr(one_shot, "_symmetric_memory", lambda: memory)
    monkeypatch.setattr(torch.ops, "symm_mem", memory)
    ranks = ThreadRanks(2)

    def make(rank: int) -> one_shot.OneShotAllReduce | None:
        return one_shot.make_one_shot(store, rank, 2, torch.device("cpu"), ranks.groups[rank].all_gather)

    made = ranks.run(make)
    if broken_rank is not None:
        assert made == [None, None], "all ranks or none"
        ranks.close()
        return
    for dtype in (torch.float32, torch.bfloat16):
        tensors = [values(rank, 4096, dtype).view(64, 64) for rank in range(2)]
        whole = torch.stack(tensors).sum(0)
        ranks.run(lambda rank, tensors=tensors: made[rank](tensors[rank]))
        assert all(torch.equal(tensor, whole) for tensor in tensors)
    takes = made[0].takes
    assert takes(torch.zeros(131072)) and takes(torch.zeros(8, dtype=torch.bfloat16))
    too_large, odd, integers = torch.zeros(131076), torch.zeros(3), torch.zeros(8, dtype=torch.int32)
    assert not any(map(takes, (too_large, odd, integers, torch.zeros(0))))
    ranks.close()


@pytest.mark.parametrize("fails", ["access", "end"])
def test_devices_that_do_not_reach_each_other(monkeypatch: pytest.MonkeyPatch, fails: str) -> None:
    """Where they say so there are no such sums; where they do not, the trial's wait for it ends."""
    event = type("Event", (), {"record": lambda _: None, "query": lambda _: fails == "access"})
    monkeypatch.setattr(torch.cuda, "Event", event)
    monkeypatch.setattr(one_shot, "TRIAL_SECONDS", 0.01)
    if fails == "end":
        with pytest.raises(one_shot.TrialHangs, match="disable_custom_all_reduce=True"):
            one_shot._await(torch.device("cuda", 0))
        return
    one_shot._await(torch.device("cuda", 0))
    asked = []
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda *pair: asked.append(pair) or pair[1] != 2)
    store = dist.HashStore()
    for rank in range(4):
        store.set(
            f"one_shot/place/{rank}", f"{socket.gethostname()} {os.environ.get('CUDA_VISIBLE_DEVICES', '')} {rank}"
        )
    monkeypatch.setattr(one_shot, "_symmetric_memory", lambda: None)
    with pytest.raises(ValueError, match="cuda:1 has no peer access to device 2"):
        one_shot._allocate(store, 1, 4, torch.device("cuda", 1))
    assert asked == [(torch.device("cuda", 1), other) for other in (0, 2, 3)]


def test_what_small_sums_do_not_take_goes_to_nccl() -> None:
    nccl, summed = Nccl(), []
    group = DeviceCommunicator(nccl)
    kernel = {"takes": lambda _, tensor: len(tensor) < 9, "__call__": lambda _, tensor: summed.append(tensor)}
    group.one_shot = type("OneShot", (), kernel)()
    group.all_reduce(torch.zeros(8))
    assert len(summed) == 1 and not nccl.options
    group.all_reduce(torch.zeros(9))
    assert len(summed) == 1 and list(nccl.options) == ["allreduce"]


def test_disconnecting_ends_a_wait_for_a_rank_that_says_nothing() -> None:
    """Over gloo, where torch's `abort` does not."""
    ranks = ThreadRanks(2, shared=False)
    first, _ = ranks.groups
    timer = threading.Timer(0.3, first.disconnect)
    timer.start()
    with pytest.raises(PeerLostError, match="rank 0 lost the others"):
        first.all_reduce(torch.ones(1))
    with pytest.raises(PeerLostError):
        first.all_reduce(torch.ones(1))
    timer.join()
    ranks.close()
