"""Groups of ranks by upstream's names. A replica's ranks are its tensor-parallel group; it has no pipeline."""

from __future__ import annotations

import gc
from contextlib import suppress
from datetime import timedelta
from typing import Any, NoReturn

import torch
import torch.distributed as dist

from vllm.distributed.communicator import ALONE, Communicator
from vllm.distributed.parallel_state import get_tp_group, set_tp_group
from vllm.upstream.utils.unserved import refuse

GroupCoordinator = Communicator


def get_world_group() -> Communicator:
    """All ranks of torch.distributed, where it is initialised (by torchrun's script, or by
    `init_distributed_environment`), else the tensor-parallel group."""
    return Communicator(dist.group.WORLD) if dist.is_initialized() else get_tp_group()


def get_pp_group() -> Communicator:
    """A group of one rank: layers are not split over ranks."""
    return ALONE


def get_dp_group() -> Communicator:
    """A group of one rank: replicas know nothing of one another."""
    return ALONE


def get_tensor_model_parallel_world_size() -> int:
    """Ranks of the tensor-parallel group."""
    return get_tp_group().world_size


def get_tensor_model_parallel_rank() -> int:
    """This process's rank in it."""
    return get_tp_group().rank


def init_distributed_environment(
    world_size: int = -1,
    rank: int = -1,
    distributed_init_method: str = "env://",
    local_rank: int = -1,
    backend: str = "nccl",
    timeout: timedelta | None = None,
) -> None:
    """Initialise torch.distributed, unless it is. Engines need it not: they make groups of their own.

    Args:
        world_size, rank: -1: from the environment.
        local_rank: the CUDA device to make current; -1: leave it.
        backend: "gloo" in place of "nccl" where there is no GPU.
    """
    if dist.is_initialized():
        return
    if backend == "nccl" and not torch.cuda.is_available():
        backend = "gloo"
    dist.init_process_group(
        backend, init_method=distributed_init_method, world_size=world_size, rank=rank, timeout=timeout
    )
    if local_rank >= 0 and torch.cuda.is_available():
        torch.cuda.set_device(local_rank)


def initialize_model_parallel(
    tensor_model_parallel_size: int = 1,
    pipeline_model_parallel_size: int = 1,
    prefill_context_model_parallel_size: int = 1,
    decode_context_model_parallel_size: int | None = 1,
    backend: str | None = None,
) -> None:
    """Make torch.distributed's ranks the tensor-parallel group of what this process builds from now on.

    Raises:
        ValueError: a size that is neither 1 nor, for tensor_model_parallel_size, the number of ranks.
    """
    for name, size in (
        ("pipeline_model_parallel_size", pipeline_model_parallel_size),
        ("prefill_context_model_parallel_size", prefill_context_model_parallel_size),
        ("decode_context_model_parallel_size", decode_context_model_parallel_size),
    ):
        if size not in (None, 1):
            raise ValueError(f"{name} must be 1, got {size}: only tensor_model_parallel_size splits a model")
    world_size = dist.get_world_size() if dist.is_initialized() else 1
    if tensor_model_parallel_size not in (1, world_size):
        raise ValueError(f"tensor_model_parallel_size must be 1 or {world_size}, got {tensor_model_parallel_size}")
    set_tp_group(get_world_group() if tensor_model_parallel_size > 1 else ALONE)


def ensure_model_parallel_initialized(
    tensor_model_parallel_size: int,
    pipeline_model_parallel_size: int,
    prefill_context_model_parallel_size: int = 1,
    decode_context_model_parallel_size: int | None = 1,
    backend: str | None = None,
) -> None:
    """`initialize_model_parallel`, unless the group has this size."""
    if get_tp_group().world_size != tensor_model_parallel_size or pipeline_model_parallel_size != 1:
        initialize_model_parallel(
            tensor_model_parallel_size,
            pipeline_model_parallel_size,
            prefill_context_model_parallel_size,
            decode_context_model_parallel_size,
            backend,
        )


def model_parallel_is_initialized() -> bool:
    """True: what is built outside a group is built for one rank."""
    return True


def destroy_model_parallel() -> None:
    """Build for one rank again, in this process, from now on. Engines keep their groups until they end."""
    set_tp_group(ALONE)


def destroy_distributed_environment() -> None:
    """End torch.distributed, where it is initialised."""
    if dist.is_initialized():
        dist.destroy_process_group()


def cleanup_dist_env_and_memory(shutdown_ray: bool = False) -> None:
    """Both of these; then collect garbage and give the memory back that torch keeps for later.

    Args:
        shutdown_ray: leave Ray's cluster, too, if Ray is there.
    """
    destroy_model_parallel()
    destroy_distributed_environment()
    if shutdown_ray:
        with suppress(ImportError):
            import ray

            ray.shutdown()
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def get_ep_group() -> Communicator:
    """The ranks that share experts: each has all of them."""
    return ALONE


def get_eplb_group() -> Communicator:
    """The ranks that balance experts: there is nothing to balance."""
    return ALONE


def graph_capture(device: torch.device) -> NoReturn:
    """
    Raises:
        NotImplementedError: always.
    """
    refuse(
        "graph_capture",
        "the engine captures its own; torch.cuda.graph captures others",
    )


def in_the_same_node_as(pg: Any, source_rank: int = 0) -> NoReturn:
    """
    Raises:
        NotImplementedError: always.
    """
    refuse("in_the_same_node_as", "ask every rank for its host's name, by torch.distributed.all_gather_object")
