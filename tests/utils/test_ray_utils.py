"""How many CPUs actors can have on a cluster of two nodes with two each."""

from __future__ import annotations

import threading
import time

import pytest

from vllm.utils.ray_utils import call_within, cpus_for_each, node_address


@pytest.mark.parametrize(("actors", "spare", "cpus"), [(1, 0, 2), (2, 0, 2), (3, 0, 1), (4, 0, 1), (2, 1, 1)])
def test_all_that_fits_on_single_nodes(actors: int, spare: int, cpus: int, ray_cluster: str) -> None:
    assert cpus_for_each(actors, spare) == cpus


def test_no_room(ray_cluster: str) -> None:
    with pytest.raises(ValueError, match="has room for 2 actors of one CPU each, not for 3"):
        cpus_for_each(3, spare=1)


def test_a_nodes_address(ray_cluster: str) -> None:
    assert node_address() == ray_cluster.rpartition(":")[0]


def test_a_call_that_does_not_come_back_holds_nobody_up(ray_cluster: str) -> None:
    called = threading.Event()
    call_within(5.0, called.set)
    assert called.is_set()
    call_within(5.0, int, "no number")
    never = threading.Event()
    began = time.monotonic()
    call_within(0.1, never.wait)
    assert time.monotonic() - began < 5.0
    never.set()
