"""One worker a rank: rank 0's in the caller's process, the others in Ray actors, on any machine of a cluster."""

from __future__ import annotations

import contextlib
import os
import queue
import secrets
import socket
import struct
import threading
import time
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import replace
from multiprocessing.connection import Client, Connection, answer_challenge, deliver_challenge
from typing import Any

import ray
from ray.util.placement_group import (
    PlacementGroup,
    placement_group,
    placement_group_table,
    remove_placement_group,
)
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from vllm import envs
from vllm.config import VllmConfig
from vllm.distributed.stages import StageEnds
from vllm.exceptions import EngineDeadError
from vllm.utils.ray_utils import call_within, connect, cpus_for_each, current_placement_group, node_address, node_memory
from vllm.v1.executor.multiproc import MultiprocExecutor
from vllm.v1.executor.stages import StagesExecutor
from vllm.v1.executor.worker_monitor import START_SECONDS, WorkerHandle
from vllm.v1.executor.worker_proc import ReadAhead, WorkerProcess, WorkerStart

_ROOM_SECONDS = 60.0
_ENDING_SECONDS = 1.0
_TICK_SECONDS = 0.1
_LEAVE_SECONDS = 5.0  # for the cluster to end an actor, or to take its room back
_HANDSHAKE_SECONDS = 10  # for each message of a peer's handshake
_KEY_BYTES = 32
_TCP_USER_TIMEOUT = getattr(socket, "TCP_USER_TIMEOUT", 18)


class RayExecutor(MultiprocExecutor):
    """A MultiprocExecutor whose further workers are actors of a Ray cluster (the one that this process is connected to,
    else that of RAY_ADDRESS, else a new one on this machine), on as few nodes as can hold them, this one first. A
    placement group keeps a bundle for each rank or, of several stages, for those of each: one GPU a rank, or as many
    CPUs as there is room for. It is the configuration's or the one that the caller runs in, where that has as many.
    ConnectionError: no cluster at RAY_ADDRESS; ValueError: no room there.
    """

    def __init__(self, config: VllmConfig, use_tqdm: bool = False) -> None:
        self._link_seconds = envs.worker_link_timeout_seconds()
        connect()
        self.host = node_address()
        self._release: weakref.finalize | None = None
        try:
            super().__init__(config, use_tqdm)
        except BaseException:
            self._release_bundles()
            raise

    def shutdown(self) -> None:
        super().shutdown()
        self._release_bundles()

    def _release_bundles(self) -> None:
        if self._release is not None:
            self._release()

    def _start_workers(self, config: VllmConfig, store_port: int) -> Sequence[WorkerHandle]:
        world_size, width = config.parallel_config.world_size, config.parallel_config.tensor_parallel_size
        num_stages = world_size // width
        together = width if num_stages > 1 else 1
        on_gpus = config.device_config.device == "cuda"
        own = {"GPU": 1.0, "CPU": 1.0} if on_gpus else {"CPU": 0.0}  # of a rank
        bundles = config.parallel_config.placement_group or current_placement_group()
        if bundles is not None and bundles.bundle_count >= world_size // together:
            # Its CPUs are the caller's to count: the actor that this process belongs to may have one of them.
            own = {**own, "CPU": 0.0}
            together = 1 if bundles.bundle_count >= world_size else together
        else:
            if not on_gpus:
                own = {"CPU": float(cpus_for_each(world_size, together=together))}
            bundle, count = {kind: together * amount for kind, amount in own.items()}, world_size // together
            # Rank 0's bundle, on this node, reserves what this process uses.
            here = {"ray.io/node-id": ray.get_runtime_context().get_node_id()}
            bundles = placement_group([bundle] * count, "PACK", bundle_label_selector=[here, *[{}] * (count - 1)])
            self._release = weakref.finalize(self, _remove, bundles)
        if not bundles.wait(_ROOM_SECONDS):
            specs = " and ".join(map(str, bundles.bundle_specs))
            problem = f"the cluster had no room for {specs} within {_ROOM_SECONDS:.0f} s"
            raise ValueError(f"distributed_executor_backend='ray': {problem}; it has {ray.available_resources()}")
        if on_gpus:
            _check_own_gpu(bundles)
        nodes = _nodes_of(bundles, world_size, together)
        self._num_here = nodes.count(nodes[0])
        rooms = _rooms(nodes, node_memory(), width) if num_stages > 1 else ()
        key = secrets.token_bytes(_KEY_BYTES)
        store = (self.host, store_port)
        workers: dict[int, RayWorker] = {}
        with socket.create_server((self.host, 0)) as server:
            try:
                self._ends = StageEnds(num_stages - 1, num_stages, rooms=rooms)
                for rank in range(1, world_size):
                    ends = replace(self._ends, index=num_stages - 1 - rank // width)
                    num_here = nodes.count(nodes[rank])
                    start = WorkerStart(config, rank, width, store, self.host, num_here, None, None, ends)
                    place = PlacementGroupSchedulingStrategy(bundles, rank // together)
                    workers[rank] = RayWorker(start, place, own, server.getsockname()[:2], key)
                _connect_all(workers, server, key)
            except BaseException:
                for worker in workers.values():
                    worker.kill()
                raise
        return list(workers.values())


class RayStagesExecutor(StagesExecutor, RayExecutor):
    """A StagesExecutor over actors: a bundle for each stage, so that its ranks are on one node."""


class RayWorker:
    """A WorkerHandle of an actor."""

    connection: Connection

    def __init__(
        self,
        start: WorkerStart,
        place: PlacementGroupSchedulingStrategy,
        resources: dict[str, float],
        address: tuple[str, int],
        key: bytes,
    ) -> None:
        self.rank = start.rank
        # Ray sets OMP_NUM_THREADS to the actor's CPUs unless it is given.
        names = [name for name in os.environ if name.startswith("VLLM_") or name == "OMP_NUM_THREADS"]
        environment = {name: os.environ[name] for name in names}
        self._actor = _WorkerActor.options(  # type: ignore[attr-defined]
            num_cpus=resources["CPU"],
            num_gpus=resources.get("GPU", 0),
            scheduling_strategy=place,
            runtime_env={"env_vars": environment},
        ).remote()
        self.done = self._actor.run.remote(start, address, key)

    def has_ended(self) -> bool:
        return bool(ray.wait([self.done], timeout=0)[0])

    def ending(self) -> str:
        if not ray.is_initialized():
            # A question would start a cluster.
            return "this process has left the Ray cluster"
        try:
            ray.get(self.done, timeout=_ENDING_SECONDS)
        except ray.exceptions.GetTimeoutError:
            return "it closed its connection"
        except ray.exceptions.RayError as error:
            return f"its actor died: {' '.join(str(error).split())}"
        return "its actor ended"

    def end(self, deadline: float) -> None:
        if ray.is_initialized():
            ray.wait([self.done], timeout=max(deadline - time.monotonic(), 0))
        self.kill()

    def kill(self) -> None:
        # At the interpreter's exit Ray may be shut down, and the actors with it.
        call_within(_LEAVE_SECONDS, ray.kill, self._actor)


@ray.remote(max_restarts=0)
class _WorkerActor:
    """Runs a WorkerProcess."""

    def run(self, start: WorkerStart, address: tuple[str, int], key: bytes) -> int:
        """Connect to the executor at `address` and run until it ends."""
        connection = Client(address, authkey=key)
        _limit_silence(connection.fileno())
        connection.send_bytes(str(start.rank).encode())
        return WorkerProcess(ReadAhead(connection), replace(start, address=node_address())).run()


def _nodes_of(bundles: PlacementGroup, world_size: int, together: int) -> list[str]:
    """The node of each rank, of which a bundle has so many."""
    nodes = placement_group_table(bundles)["bundles_to_node_id"]
    return [nodes[rank // together] for rank in range(world_size)]


def _rooms(nodes: Sequence[str], memory: Mapping[str, float], width: int) -> tuple[float, ...]:
    """Bytes of memory for a rank of each stage, in the order of stages. `nodes`: of each rank, whose first `width` are
    the last stage's; they share what their node has. `memory`: bytes, by node."""
    shares = [memory[node] / nodes.count(node) for node in nodes]
    return tuple(min(shares[first : first + width]) for first in range(0, len(nodes), width))[::-1]


@ray.remote(num_cpus=0, num_gpus=1)
def _gpu_of_bundle() -> list[Any]:
    return ray.get_gpu_ids()


def _check_own_gpu(bundles: PlacementGroup) -> None:
    """Raises ValueError when Ray reserved another GPU for rank 0 than this process's first, which rank 0 uses;
    EngineDeadError when Ray does not answer in time."""
    place = PlacementGroupSchedulingStrategy(bundles, placement_group_bundle_index=0)
    task = _gpu_of_bundle.options(scheduling_strategy=place).remote()
    if not ray.wait([task], timeout=START_SECONDS)[0]:
        raise EngineDeadError(f"Ray did not say within {START_SECONDS:g} s which GPU it has for rank 0")
    kept = [str(gpu) for gpu in ray.get(task)]
    own = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]
    if kept != [own]:
        problem = f"rank 0 uses GPU {own}, but Ray has only {', '.join(kept)} for it"
        advice = "set CUDA_VISIBLE_DEVICES, or end what holds the GPU"
        raise ValueError(f"distributed_executor_backend='ray': {problem}; {advice}")


def _connect_all(workers: dict[int, RayWorker], server: socket.socket, key: bytes) -> None:
    """Wait for every worker's connection."""
    waiting = dict(workers)
    came: queue.SimpleQueue[tuple[int, Connection]] = queue.SimpleQueue()
    deadline = time.monotonic() + START_SECONDS
    server.settimeout(_TICK_SECONDS)
    while True:
        while not came.empty():
            rank, connection = came.get()
            waiting.pop(rank).connection = connection
        if not waiting:
            return
        for rank, worker in waiting.items():
            if worker.has_ended():
                raise EngineDeadError(f"tensor-parallel rank {rank} has gone: {worker.ending()}")
        if time.monotonic() > deadline:
            host, port = server.getsockname()[:2]
            ranks = ", ".join(map(str, waiting))
            problem = f"no actor has connected to {host}:{port} within {START_SECONDS:g} s"
            raise EngineDeadError(f"tensor-parallel rank {ranks} did not start: {problem}")
        with contextlib.suppress(TimeoutError):
            peer, _ = server.accept()
            # In a thread: any process may connect, and one that sends nothing must not delay the workers.
            threading.Thread(target=_welcome, args=(peer, key, came), daemon=True).start()


def _welcome(peer: socket.socket, key: bytes, came: queue.SimpleQueue[tuple[int, Connection]]) -> None:
    """Put a worker's rank and connection into `came`; reject peers without the key."""
    with peer:
        # A step is sent at once, without waiting for the acknowledgement of the one before.
        peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        peer.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("ll", _HANDSHAKE_SECONDS, 0))
        connection = Connection(os.dup(peer.fileno()))
        try:
            deliver_challenge(connection, key)
            answer_challenge(connection, key)
            rank = int(connection.recv_bytes())
        except Exception:
            connection.close()
            return
        peer.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("ll", 0, 0))
        _limit_silence(peer.fileno())
        came.put((rank, connection))


def _limit_silence(descriptor: int) -> None:
    """Close the connection when what is sent is not acknowledged in time."""
    with socket.socket(fileno=os.dup(descriptor)) as connection:
        milliseconds = int(envs.worker_link_timeout_seconds() * 1000)
        connection.setsockopt(socket.IPPROTO_TCP, _TCP_USER_TIMEOUT, milliseconds)


def _remove(bundles: PlacementGroup) -> None:
    call_within(_LEAVE_SECONDS, remove_placement_group, bundles)
