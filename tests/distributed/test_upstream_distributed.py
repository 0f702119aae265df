"""Groups of ranks by the names that upstream's callers know."""

from __future__ import annotations

import threading

import pytest
import torch
import torch.distributed as dist

import vllm.distributed as distributed
from vllm.distributed import parallel_state
from vllm.distributed.communicator import ALONE, Communicator
from vllm.distributed.utils import StatelessProcessGroup, divide, get_pp_indices, split_tensor_along_last_dim
from vllm.utils.network_utils import get_open_port


def on_all_ranks(world_size, work):
    """work(group) of each rank, each in its thread."""
    port, results, errors = get_open_port(), {}, []

    def run(rank):
        try:
            results[rank] = work(StatelessProcessGroup.create("127.0.0.1", port, rank, world_size, store_timeout=20))
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(rank,), daemon=True) for rank in range(world_size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert not errors and len(results) == world_size, errors
    return [results[rank] for rank in range(world_size)]


def test_values_between_processes():
    def work(group):
        gathered = group.all_gather_obj({"rank": group.rank})
        told = group.broadcast_obj("news" if group.rank == 1 else None, src=1)
        total = group.all_reduce(torch.full((2,), float(group.rank + 1)))
        weights = group.broadcast(torch.arange(3) if group.rank == 0 else torch.empty(3), src=0)
        if group.rank == 0:
            group.send_obj("to one", dst=1)
            group.send(torch.ones(2), dst=1)
            got = None
        elif group.rank == 1:
            got = (group.recv_obj(src=0), group.recv(torch.zeros(2), src=0).tolist())
        else:
            got = None
        group.barrier()
        return gathered, told, total.tolist(), weights.tolist(), got

    results = on_all_ranks(3, work)
    for gathered, told, total, weights, _ in results:
        assert gathered == [{"rank": 0}, {"rank": 1}, {"rank": 2}]
        assert (told, total, weights) == ("news", [6.0, 6.0], [0, 1, 2])
    assert results[1][4] == ("to one", [1.0, 1.0])


def test_a_rank_that_does_not_come():
    def work(group):
        if group.rank == 0:
            with pytest.raises(RuntimeError, match="not all of 2 ranks"):
                group.barrier(timeout=0.2)
        return True

    assert on_all_ranks(2, work) == [True, True]


def test_values_are_forgotten_in_time():
    def work(group):
        group.data_expiration_seconds = -1
        if group.rank == 0:
            group.send_obj("old", dst=1)
            group.expire_data()
            assert not group.store.check(["send_to/1/from/0/0"])
        group.barrier()
        return True

    assert on_all_ranks(2, work) == [True, True]


def test_parts_of_a_whole():
    assert divide(6, 3) == 2
    with pytest.raises(AssertionError, match="7 is not divisible by 2"):
        divide(7, 2)
    parts = split_tensor_along_last_dim(torch.arange(8).view(2, 4), 2, contiguous_split_chunks=True)
    assert [part.tolist() for part in parts] == [[[0, 1], [4, 5]], [[2, 3], [6, 7]]]
    assert all(part.is_contiguous() for part in parts)


def test_one_process_is_one_rank():
    for group in (distributed.get_tp_group(), distributed.get_pp_group(), distributed.get_dp_group()):
        assert (group.world_size, group.rank_in_group, group.ranks) == (1, 0, [0])
        assert group.is_first_rank and group.is_last_rank and group.device_group is None
    assert isinstance(distributed.get_world_group(), parallel_state.GroupCoordinator)
    assert distributed.get_tensor_model_parallel_world_size() == 1
    assert distributed.get_tensor_model_parallel_rank() == 0
    row = torch.arange(3.0)
    assert distributed.tensor_model_parallel_all_reduce(row).equal(row)
    assert distributed.tensor_model_parallel_all_gather(row).equal(row)
    assert distributed.tensor_model_parallel_gather(row).equal(row)
    assert distributed.model_parallel_is_initialized()


def test_the_global_group_comes_and_goes():
    assert not dist.is_initialized()
    try:
        distributed.init_distributed_environment(1, 0, f"tcp://127.0.0.1:{get_open_port()}", backend="gloo")
        distributed.ensure_model_parallel_initialized(1, 1)
        world = distributed.get_world_group()
        assert (world.world_size, world.device_group) == (1, dist.group.WORLD)
        assert isinstance(world, Communicator)
        with pytest.raises(ValueError, match="tensor_model_parallel_size must be 1 or 1, got 2"):
            distributed.initialize_model_parallel(2)
        with pytest.raises(ValueError, match="pipeline_model_parallel_size must be 1, got 2"):
            distributed.initialize_model_parallel(1, 2)
    finally:
        distributed.cleanup_dist_env_and_memory()
    assert not dist.is_initialized()
    assert distributed.get_tp_group() is ALONE


def test_layers_are_shared_out():
    assert [get_pp_indices(10, rank, 4) for rank in range(4)] == [(0, 2), (2, 5), (5, 8), (8, 10)]
    assert get_pp_indices(3, 0, 1) == (0, 3)


def test_a_group_of_one_has_all():
    tensor = torch.arange(4.0)
    assert torch.equal(distributed.tensor_model_parallel_reduce_scatter(tensor), tensor)
    assert distributed.broadcast_tensor_dict({"a": 1}) == {"a": 1}
    assert distributed.get_ep_group().world_size == distributed.get_eplb_group().world_size == 1
