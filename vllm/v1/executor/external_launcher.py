"""One of several processes that torchrun started, each with an engine and a rank's worker of its own."""

from __future__ import annotations

import itertools
import os
import weakref

import torch
import torch.distributed as dist

from vllm.config import VllmConfig
from vllm.distributed.communicator import Communicator
from vllm.distributed.process_group import JOIN_TIMEOUT, join_group
from vllm.v1.executor.uniproc import UniProcExecutor
from vllm.v1.executor.worker import worker_device

# Engines of one process meet apart from one another.
_numbers = itertools.count()


class ExternalLauncherExecutor(UniProcExecutor):
    """Every process makes the same calls with the same arguments; their schedulers then choose the same steps. Ranks
    are consecutive: T processes make one replica of tensor_parallel_size=T.

    Raises:
        ValueError: torchrun's variables are missing, or their ranks do not make whole replicas.
    """

    def __init__(self, config: VllmConfig, use_tqdm: bool = False) -> None:
        super().__init__(config, use_tqdm, _join(config))
        weakref.finalize(self, self.group.close)

    def _least(self, number: int) -> int:
        """The lowest number of all ranks."""
        device = "cpu" if self.worker.device.type == "cpu" else self.worker.device
        return int(self.group.all_gather(torch.tensor([number], device=device)).min())


def _join(config: VllmConfig) -> Communicator:
    size = config.parallel_config.tensor_parallel_size
    number = next(_numbers)
    if size == 1:
        return Communicator()
    rank, world_size = (_variable(name) for name in ("RANK", "WORLD_SIZE"))
    if world_size % size:
        raise ValueError(f"tensor_parallel_size={size} must divide the number of processes, WORLD_SIZE={world_size}")
    own = rank % size
    store = dist.PrefixStore(f"vllm/{number}/{rank // size}", _store(rank, world_size))
    custom = not config.parallel_config.disable_custom_all_reduce
    return join_group(store, own, size, worker_device(config, own), os.environ["MASTER_ADDR"], custom)


def _store(rank: int, world_size: int) -> dist.Store:
    if dist.is_initialized():
        return dist.distributed_c10d._get_default_store()
    is_master = rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    address, port = os.environ["MASTER_ADDR"], _variable("MASTER_PORT")
    return dist.TCPStore(address, port, world_size, is_master, JOIN_TIMEOUT, wait_for_workers=False)


def _variable(name: str) -> int:
    value = os.environ.get(name)
    if value is None or "MASTER_ADDR" not in os.environ:
        raise ValueError(
            f"distributed_executor_backend='external_launcher' needs the variables that torchrun sets; {name} or "
            "MASTER_ADDR is missing"
        )
    return int(value)
