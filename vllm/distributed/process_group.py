"""Process groups without torch.distributed's global state: one process may hold several engines, and callers may use
torch.distributed themselves."""

from __future__ import annotations

import os
import socket
import stat
from contextlib import suppress
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from vllm import envs
from vllm.distributed.communicator import Communicator
from vllm.distributed.one_shot import OneShotAllReduce, make_one_shot

JOIN_TIMEOUT = timedelta(minutes=5)
# A rank may wait for as long as another one computes; the executor's watchdog decides whether one hangs.
_COLLECTIVE_TIMEOUT = timedelta(days=7)
# NCCL ends the process when its own has passed: after the watchdog had its chance.
_NCCL_GRACE_SECONDS = 60.0


def host_store(host: str, world_size: int) -> dist.TCPStore:
    """The store where `world_size` ranks meet, on a free port of `host`, this machine's address."""
    return dist.TCPStore(host, 0, world_size, is_master=True, wait_for_workers=False, timeout=JOIN_TIMEOUT)


def connect_store(host: str, port: int, world_size: int) -> dist.TCPStore:
    """The store that another process hosts."""
    return dist.TCPStore(host, port, world_size, is_master=False, wait_for_workers=False, timeout=JOIN_TIMEOUT)


class DeviceCommunicator(Communicator):
    """Over NCCL; small sums of devices that share memory take one kernel."""

    def __init__(self, group: dist.ProcessGroupNCCL) -> None:
        super().__init__(group)
        self.one_shot: OneShotAllReduce | None = None

    def _all_reduce(self, tensor: Tensor) -> None:
        if self.one_shot is not None and self.one_shot.takes(tensor):
            self.one_shot(tensor)
        else:
            super()._all_reduce(tensor)


class HostCommunicator(Communicator):
    """Over gloo; `connections` are its sockets, as of `_connections`."""

    def __init__(self, group: dist.ProcessGroupGloo, connections: dict[int, int]) -> None:
        super().__init__(group)
        self._connections = connections

    def disconnect(self) -> None:
        """See Communicator."""
        # torch's own `abort` leaves gloo's collectives waiting.
        for descriptor, inode in self._connections.items():
            with suppress(OSError):
                if os.fstat(descriptor).st_ino == inode:
                    with socket.socket(fileno=os.dup(descriptor)) as connection:
                        connection.shutdown(socket.SHUT_RDWR)


def _connections() -> dict[int, int]:
    """This process's connected TCP sockets: descriptors, and the inodes by which a reused number is told."""
    found = {}
    for descriptor in map(int, os.listdir("/dev/fd")):
        with suppress(OSError):
            if not stat.S_ISSOCK(os.fstat(descriptor).st_mode):
                continue
        with suppress(OSError), socket.socket(fileno=os.dup(descriptor)) as connection:
            if connection.family in (socket.AF_INET, socket.AF_INET6) and connection.type == socket.SOCK_STREAM:
                connection.getpeername()  # an OSError unless it is connected
                found[descriptor] = os.fstat(descriptor).st_ino
    return found


def join_group(
    store: dist.Store,
    rank: int,
    world_size: int,
    device: torch.device,
    address: str,
    has_custom_all_reduce: bool = True,
) -> Communicator:
    """Join the other ranks; returns when all of them have joined. RuntimeError if a rank did not join in time. `store`
    is shared by all ranks and used for nothing else; `device` is that of the rank's tensors: gloo connects CPUs, NCCL
    CUDA devices, which, with `has_custom_all_reduce`, add small tensors up through shared memory; `address` is this
    machine's, where gloo listens."""
    if device.type == "cuda":
        torch.cuda.set_device(device)
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = timedelta(seconds=envs.worker_timeout_seconds() + _NCCL_GRACE_SECONDS)
        devices = DeviceCommunicator(dist.ProcessGroupNCCL(store, rank, world_size, options))
        if has_custom_all_reduce:
            devices.one_shot = make_one_shot(store, rank, world_size, device, devices.all_gather)
        return devices
    return connect_hosts(store, rank, world_size, address, _COLLECTIVE_TIMEOUT)


def connect_hosts(store: dist.Store, rank: int, world_size: int, address: str, timeout: timedelta) -> HostCommunicator:
    """As join_group, over gloo. `timeout`: how long a collective waits for the other ranks."""
    options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    options._devices = [dist.ProcessGroupGloo.create_device(hostname=address)]
    options._timeout = JOIN_TIMEOUT
    before = _connections().items()
    group = dist.ProcessGroupGloo(store, rank, world_size, options)
    group._set_default_timeout(timeout)
    # Another thread's that were made meanwhile are among them; on `disconnect` the process has no more use for peers.
    return HostCommunicator(group, dict(_connections().items() - before))
