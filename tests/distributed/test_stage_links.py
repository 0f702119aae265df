"""Links between stages, and how layers are shared out to them."""

from __future__ import annotations

import itertools
import math
import socket
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import torch.distributed as dist

from vllm.distributed.communicator import Communicator, PeerLostError
from vllm.distributed.stages import (
    ModelSizes,
    Stage,
    StageEnds,
    connect_ends,
    layers_as_asked,
    make_ends,
    split_layers,
)


def test_rows_arrive_in_order_and_unchanged():
    first, last = (Stage(ends, Communicator()) for ends in make_ends(2))
    # Larger than a socket's buffers: sending does not wait for who receives.
    sent = [torch.randn(3000 + count, 64, generator=torch.Generator().manual_seed(count)) for count in range(4)]
    for each in sent:
        first.send(each.bfloat16())
    for each in sent:
        received = last.receive(torch.empty(each.shape, dtype=torch.bfloat16))
        assert torch.equal(received, each.bfloat16())
    num_bytes = sum(each.numel() * 2 for each in sent)
    assert first.group.num_bytes == {"send": num_bytes} and last.group.num_bytes == {"receive": num_bytes}
    assert first.group.num_calls["send"] == last.group.num_calls["receive"] == 4
    assert first.is_first and not first.is_last and last.is_last
    for each in first, last:
        each.close()


@pytest.mark.parametrize("which", ["disconnect", "close"])
def test_who_waits_for_a_lost_stage_gets_an_error(which):
    first, last = (Stage(ends, Communicator()) for ends in make_ends(2))
    threading.Timer(0.1, getattr(first, which)).start()
    with pytest.raises(PeerLostError, match="stage 1 lost stage 0"):
        last.receive(torch.empty(4, 4))
    assert not last.group.is_waiting
    last.close()


def test_who_lets_go_of_its_neighbours_waits_no_more():
    """As the monitor's thread does for a rank whose neighbour cannot be reached."""
    first, last = (Stage(ends, Communicator()) for ends in make_ends(2))
    threading.Timer(0.1, last.disconnect).start()
    with pytest.raises(PeerLostError, match="stage 1 lost stage 0"):
        last.receive(torch.empty(4, 4))
    for each in first, last:
        each.close()


def test_stages_of_several_machines_find_each_other():
    """Two ranks of three stages each; who is no neighbour is not taken for one."""
    store, strangers = dist.HashStore(), []

    def connect(index: int, number: int) -> Stage:
        ends = StageEnds(index, 3)
        assert ends.are_elsewhere
        if index == 0:
            host, port, _ = store.get(f"link/1/{number}").decode().split()
            strangers.append(socket.create_connection((host, int(port))))
            strangers[-1].sendall(b"GET / HTTP/1.1\r\nHost: somewhere.example\r\n\r\n")
        return Stage(connect_ends(ends, store, number, "127.0.0.1"), Communicator())

    with ThreadPoolExecutor(6) as pool:
        made = {place: pool.submit(connect, *place) for place in itertools.product(range(3), range(2))}
        stages = {place: each.result(30) for place, each in made.items()}
    for number in range(2):
        sent = torch.randn(5, 3, generator=torch.Generator().manual_seed(number))
        stages[0, number].send(sent)
        stages[1, number].send(stages[1, number].receive(torch.empty(5, 3)) + 1)
        assert torch.equal(stages[2, number].receive(torch.empty(5, 3)), sent + 1)
    for each in *stages.values(), *strangers:
        each.close()


LAYERS = [50, 10, 40, 40, 20, 90, 30]


def splits(size: int) -> list[list[range]]:
    """Every way to share LAYERS out."""
    bounds = [(0, *inner, 7) for inner in itertools.combinations(range(1, 7), size - 1)]
    return [[range(*each) for each in itertools.pairwise(own)] for own in bounds]


def seconds(split: list[range], head: int) -> float:
    """The slowest stage's, in bytes."""
    return max(sum(LAYERS[layer] for layer in own) + (head / 4 if own.stop == 7 else 0) for own in split)


def fullness(split: list[range], cache: int, embedding: int, head: int, rooms: tuple[float, ...]) -> float:
    needed = [sum(LAYERS[layer] + cache for layer in own) for own in split]
    needed[0] += embedding
    needed[-1] += head
    return max(own / room for own, room in zip(needed, rooms, strict=True))


@pytest.mark.parametrize("size", [1, 2, 3, 4])
@pytest.mark.parametrize("head", [0, 70, 200])
def test_the_slowest_stage_is_as_fast_as_it_can_be(size: int, head: int) -> None:
    split = split_layers(ModelSizes(LAYERS, [5] * 7, 90, head), size)
    assert seconds(split, head) == min(seconds(each, head) for each in splits(size))
    assert [layer for own in split for layer in own] == list(range(7))


@pytest.mark.parametrize("rooms", [(400, 100, 300), (150, 500, 200), (100, 100, 100), (90, 600, math.inf)])
def test_stages_have_room_for_what_is_theirs(rooms: tuple[float, ...]) -> None:
    parts = {"cache": 5, "embedding": 30, "head": 40}
    split = split_layers(ModelSizes(LAYERS, [5] * 7, 30, 40), 3, rooms)
    fitting = [each for each in splits(3) if fullness(each, rooms=rooms, **parts) <= 1]
    if fitting:
        assert split in fitting and seconds(split, 40) == min(seconds(each, 40) for each in fitting)
    else:
        assert fullness(split, rooms=rooms, **parts) == min(fullness(each, rooms=rooms, **parts) for each in splits(3))


def test_layers_that_go_together() -> None:
    sizes = ModelSizes([1] * 6, [0] * 6, 0, 0, num_of_first=4)
    assert split_layers(sizes, 2) == [range(4), range(4, 6)]
    assert split_layers(sizes, 3) == [range(4), range(4, 5), range(5, 6)]
    with pytest.raises(ValueError, match="pipeline_parallel_size=4: the first 4 of the model's 6 layers go together"):
        split_layers(sizes, 4)


def test_more_stages_than_layers():
    with pytest.raises(ValueError, match="pipeline_parallel_size=3 exceeds the model's 2 layers"):
        split_layers(ModelSizes([1, 1], [0, 0], 0, 0), 3)


def test_layers_by_their_numbers():
    assert layers_as_asked((1, 3), 4, 2) == [range(1), range(1, 4)]
    for counts in (1, 2), (4,), (1, 1, 2):
        with pytest.raises(ValueError, match="2 numbers that add up to the model's 4 layers, got"):
            layers_as_asked(counts, 4, 2)
