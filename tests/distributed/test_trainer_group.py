"""Tensors from a trainer to workers: what comes is what was sent, and what cannot come is an error on both sides."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from vllm.distributed.device_communicators.pynccl import PyNcclCommunicator
from vllm.distributed.trainer_group import TrainerGroup, join_trainer, receive_tensors, send_tensors
from vllm.distributed.weight_transfer.nccl_common import trainer_init
from vllm.distributed.weight_transfer.packed_tensor import (
    packed_nccl_broadcast_consumer,
    packed_nccl_broadcast_producer,
)
from vllm.utils.network_utils import get_open_port

TENSORS = [
    torch.arange(24, dtype=torch.float32).view(2, 3, 4).transpose(0, 2),
    torch.tensor(2.5, dtype=torch.float64),
    torch.arange(7).to(torch.bfloat16),
    torch.empty(0, 5),
    torch.tensor([[1.5, -2.0]]).to(torch.float8_e4m3fn),
    torch.arange(1000, dtype=torch.int64),
    torch.tensor([True, False, True]),
]
FORMS = [(tuple(tensor.shape), tensor.dtype) for tensor in TENSORS]


def together(*works: Callable[[Any], Any], are_trainers: bool = False) -> list[Any]:
    """The result of each member's work, or its error; the first is the trainer, or all of them are."""
    port, results = get_open_port(), [None] * len(works)

    def meet(rank: int) -> TrainerGroup:
        if rank and not are_trainers:
            return join_trainer("127.0.0.1", port, rank, len(works))
        return trainer_init({"master_address": "127.0.0.1", "master_port": port, "world_size": len(works)}, rank)

    def run(rank: int) -> None:
        try:
            results[rank] = works[rank](meet(rank))
        except Exception as error:
            results[rank] = error

    threads = [threading.Thread(target=run, args=(rank,), daemon=True) for rank in range(len(works))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
        assert not thread.is_alive()
    return results


def same(found: list[torch.Tensor], sent: list[torch.Tensor]) -> bool:
    pairs = zip(found, sent, strict=True)
    return all(a.dtype == b.dtype and a.shape == b.shape and a.tolist() == b.tolist() for a, b in pairs)


@pytest.mark.parametrize("bucket_bytes", [1, 100, 1 << 20], ids=["one by one", "some", "all"])
def test_what_comes_is_what_was_sent(bucket_bytes: int) -> None:
    def receive(group: TrainerGroup) -> list[list[torch.Tensor]]:
        return [list(receive_tensors(group, FORMS)), list(receive_tensors(group, FORMS[::-1]))]

    def send(group: TrainerGroup) -> None:
        send_tensors(group, iter(TENSORS), bucket_bytes=bucket_bytes)
        send_tensors(group, TENSORS[::-1], bucket_bytes=bucket_bytes)

    _, *received = together(send, receive, receive)
    for first, second in received:
        assert same(first, TENSORS)
        assert same(second, TENSORS[::-1])


@pytest.mark.parametrize(
    ("forms", "message"),
    [
        (FORMS[:-1], "tensors 0 to 6 that came are not of the announced sizes"),
        ([*FORMS, ((2,), torch.float32)], "7 tensors came, of 8"),
        ([((999,), torch.float64), *FORMS], "tensors 0 to 6 that came are not of the announced sizes"),
    ],
)
def test_others_than_announced(forms: list[Any], message: str) -> None:
    sent, received = together(
        lambda group: send_tensors(group, TENSORS, bucket_bytes=1 << 20),
        lambda group: list(receive_tensors(group, forms)),
    )
    assert isinstance(received, ValueError) and message in str(received)
    # The sender has sent, or has lost the receiver.
    assert sent is None or isinstance(sent, RuntimeError)


def test_the_callers_memory_is_its_own_again() -> None:
    def reused() -> Iterator[torch.Tensor]:
        memory = torch.empty(3)
        for value in range(4):
            yield memory.fill_(value)
            memory.zero_()

    _, received = together(
        lambda group: send_tensors(group, reused()),
        lambda group: list(receive_tensors(group, [((3,), torch.float32)] * 4)),
    )
    assert [tensor.tolist() for tensor in received] == [[value] * 3 for value in range(4)]


def test_a_sender_that_fails() -> None:
    def broken() -> Iterator[torch.Tensor]:
        yield TENSORS[0]
        raise ZeroDivisionError("of the trainer")

    sent, received = together(
        lambda group: send_tensors(group, broken(), bucket_bytes=1),
        lambda group: list(receive_tensors(group, FORMS)),
    )
    assert isinstance(sent, ZeroDivisionError)
    assert isinstance(received, RuntimeError) and "sender of the weights failed" in str(received)


def test_a_sender_that_ends() -> None:
    sent, received = together(lambda group: None, lambda group: list(receive_tensors(group, FORMS)))
    assert sent is None and isinstance(received, RuntimeError)


def test_single_tensors() -> None:
    def work(group: PyNcclCommunicator) -> tuple[torch.Tensor, ...]:
        own = torch.full((2, 3), float(group.rank + 1), dtype=torch.bfloat16)
        told = own.clone()
        group.broadcast(told, src=1)
        total = group.all_reduce(own)
        into = torch.empty_like(own)
        assert group.all_reduce(own, into) is into and torch.equal(into, total)
        gathered = torch.empty(6, 3, dtype=torch.bfloat16)
        group.all_gather(gathered, own)
        passed = own.T
        if group.rank == 0:
            group.send(passed, dst=2)
        elif group.rank == 2:
            passed = torch.zeros(2, 3, dtype=torch.bfloat16).T
            group.recv(passed, src=0)
        return told, total, gathered[::2, 0], passed[0, 0]

    for rank, (told, total, gathered, passed) in enumerate(together(work, work, work, are_trainers=True)):
        assert (told == 2).all() and (total == 6).all() and gathered.tolist() == [1, 2, 3]
        assert passed == (2 if rank == 1 else 1)


def test_by_upstreams_names() -> None:
    port, received = get_open_port(), []

    def work() -> None:
        group = trainer_init({"master_address": "127.0.0.1", "master_port": port, "world_size": 2}, rank=1)
        told = PyNcclCommunicator(group.group, device="cpu")  # a second one of the same members
        packed_nccl_broadcast_consumer(
            iter([("a", ((3, 4), torch.float32)), ("b", ((2,), torch.float16))]), told, 0, received.extend
        )

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    group = trainer_init({"master_address": "127.0.0.1", "master_port": port, "world_size": 2})
    own = PyNcclCommunicator(group.group, device="cpu")
    weights = [("a", torch.randn(3, 4)), ("b", torch.ones(2, dtype=torch.float16))]
    packed_nccl_broadcast_producer(iterator=iter(weights), group=own, src=0, post_iter_func=lambda item: item[1])
    thread.join(30)
    assert [name for name, _ in received] == ["a", "b"]
    assert same([tensor for _, tensor in received], [tensor for _, tensor in weights])
    with pytest.raises(TypeError, match="group must be a StatelessProcessGroup, got NoneType"):
        PyNcclCommunicator(None, device="cpu")
