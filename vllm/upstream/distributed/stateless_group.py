"""Groups of processes that leave torch.distributed's global state alone."""

from __future__ import annotations

import pickle
import time
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

from vllm.distributed.trainer_group import MEETING, meeting_store


@dataclass
class StatelessProcessGroup:
    """Processes that hand one another pickled values through a store, without torch.distributed's global group: such
    as a trainer and the engines that it updates. Every one makes the same calls in the same order; they trust one
    another.

    Attributes:
        rank: this process, in [0, world_size).
        world_size: how many there are.
        store: where values wait for their readers.
        data_expiration_seconds: how long a value waits at most.
    """

    rank: int
    world_size: int
    store: dist.Store
    data_expiration_seconds: int = 3600
    _counts: dict[str, int] = field(default_factory=dict, repr=False)
    _sent: list[tuple[float, str]] = field(default_factory=list, repr=False)

    @staticmethod
    def create(
        host: str,
        port: int,
        rank: int,
        world_size: int,
        data_expiration_seconds: int = 3600,
        store_timeout: int = 300,
        listen_socket: Any | None = None,
    ) -> StatelessProcessGroup:
        """Meet the others at host:port, where rank 0 keeps the store; returns when all have come.

        Args:
            store_timeout: seconds to wait for them, and for any value.
            listen_socket: a socket of rank 0's that listens there already.
        """
        options = {} if listen_socket is None else {"master_listen_fd": listen_socket.detach()}
        store = meeting_store(host, port, rank, world_size, store_timeout, **options)
        return StatelessProcessGroup(rank, world_size, store, data_expiration_seconds)

    def send_obj(self, obj: Any, dst: int) -> None:
        """Hand a value to rank `dst`."""
        self._put(f"send_to/{dst}/from/{self.rank}", obj)

    def recv_obj(self, src: int) -> Any:
        """The next value that rank `src` hands to this one."""
        key = self._next(f"send_to/{self.rank}/from/{src}")
        value = pickle.loads(self.store.get(key))
        self.store.delete_key(key)
        return value

    def broadcast_obj(self, obj: Any | None, src: int) -> Any:
        """Rank `src`'s value, on every rank."""
        if self.rank == src:
            self._put(f"broadcast_from/{src}", obj)
            return obj
        return pickle.loads(self.store.get(self._next(f"broadcast_from/{src}")))

    def all_gather_obj(self, obj: Any) -> list[Any]:
        """Every rank's value, in the order of ranks."""
        return [self.broadcast_obj(obj if rank == self.rank else None, rank) for rank in range(self.world_size)]

    def broadcast(self, tensor: torch.Tensor, src: int) -> torch.Tensor:
        """Rank `src`'s tensor; on the others a new one, of its shape and dtype."""
        return self.broadcast_obj(tensor if self.rank == src else None, src)

    def send(self, tensor: torch.Tensor, dst: int) -> None:
        """Hand a tensor to rank `dst`."""
        self.send_obj(tensor, dst)

    def recv(self, tensor: torch.Tensor, src: int) -> torch.Tensor:
        """The next tensor from rank `src`, copied into `tensor`."""
        return tensor.copy_(self.recv_obj(src))

    def all_reduce(self, tensor: torch.Tensor, op: Any = dist.ReduceOp.SUM) -> torch.Tensor:
        """The sum of the ranks' tensors.

        Raises:
            ValueError: `op` is another one.
        """
        if op != dist.ReduceOp.SUM:
            raise ValueError(f"op must be ReduceOp.SUM, got {op}")
        return torch.stack([each.to(tensor.device) for each in self.all_gather_obj(tensor)]).sum(0).to(tensor.dtype)

    def barrier(self, timeout: float = 30.0) -> None:
        """Wait until every rank is here.

        Args:
            timeout: seconds.

        Raises:
            RuntimeError: one did not come in time.
        """
        key = self._next("barrier")
        deadline = time.monotonic() + timeout
        self.store.add(f"{key}/come", 1)
        self._wait_for(f"{key}/come", self.world_size, deadline)
        self.store.add(f"{key}/gone", 1)
        if self.rank == 0:
            # It may end next, and the store with it: the others must need it no more.
            self._wait_for(f"{key}/gone", self.world_size, deadline)

    def further_store(self) -> dist.Store:
        """A store where the members meet for a group of another kind; a new one each time."""
        return dist.PrefixStore(self._next(MEETING), self.store)

    def expire_data(self) -> None:
        """Forget values that no rank has read in time."""
        oldest = time.monotonic() - self.data_expiration_seconds
        while self._sent and self._sent[0][0] < oldest:
            self.store.delete_key(self._sent.pop(0)[1])

    def _wait_for(self, key: str, count: int, deadline: float) -> None:
        while self.store.add(key, 0) < count:
            if time.monotonic() > deadline:
                raise RuntimeError(f"not all of {self.world_size} ranks came to the barrier in time")
            time.sleep(0.001)

    def _next(self, name: str) -> str:
        count = self._counts[name] = self._counts.get(name, -1) + 1
        return f"{name}/{count}"

    def _put(self, name: str, obj: Any) -> None:
        self.expire_data()
        key = self._next(name)
        self.store.set(key, pickle.dumps(obj))  # type: ignore[arg-type]
        self._sent.append((time.monotonic(), key))
