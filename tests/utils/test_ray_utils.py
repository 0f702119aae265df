"""How many CPUs actors can have on a cluster of two nodes with two each."""

from __future__ import annotations

import pytest

from vllm.utils.ray_utils import cpus_for_each


@pytest.mark.parametrize(("actors", "spare", "cpus"), [(1, 0, 2), (2, 0, 2), (3, 0, 1), (4, 0, 1), (2, 1, 1)])
def test_all_that_fits_on_single_nodes(actors: int, spare: int, cpus: int, ray_cluster: str) -> None:
    assert cpus_for_each(actors, spare) == cpus


def test_no_room(ray_cluster: str) -> None:
    with pytest.raises(ValueError, match="has room for 2 actors of one CPU each, not for 3"):
        cpus_for_each(3, spare=1)
