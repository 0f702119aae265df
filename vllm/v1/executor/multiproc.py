"""One worker a rank: rank 0's in the caller's process, the others in processes of their own."""

from __future__ import annotations

import contextlib
import os
import pickle
import subprocess
import sys
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from multiprocessing import Pipe
from typing import Any

import torch
import torch.distributed as dist

from vllm import envs
from vllm.config import ParallelConfig, VllmConfig
from vllm.distributed.communicator import Communicator, PeerLostError
from vllm.distributed.parallel_state import tensor_parallel
from vllm.distributed.process_group import host_store, join_group
from vllm.distributed.shared_memory import Links, SharedMemoryCommunicator, make_links
from vllm.distributed.stages import ONLY, Stage, StageEnds, building_stage, connect_ends, make_ends
from vllm.loader.packed_weights import Plan, planned
from vllm.loader.stage_layers import layers_of_stage
from vllm.utils.child_signals import starting_child
from vllm.utils.function_pickle import pickled
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.executor.worker import call_worker, make_worker, worker_device
from vllm.v1.executor.worker_monitor import WorkerHandle, WorkerMonitor
from vllm.v1.executor.worker_proc import CALL, STEP, STOP, WorkerStart
from vllm.v1.features.states.memory import fewest
from vllm.v1.outputs import ModelRunnerOutput, PendingStep

_NUM_THREADS = torch.get_num_threads()  # before any engine reduced it

_STOP_SECONDS = 5.0
_ENDING_SECONDS = 1.0


class LocalWorker:
    """A WorkerHandle of a process on this machine."""

    def __init__(self, start: WorkerStart) -> None:
        self.rank = start.rank
        self.connection, theirs = Pipe()
        # A fresh interpreter rather than a fork or a spawn: no thread is copied, and no main module is run again.
        environment = {
            "OMP_NUM_THREADS": str(_threads_per_rank(start.config.parallel_config)),
            **os.environ,
            "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
        }
        inherited = [theirs.fileno(), *start.ends.descriptors, *(start.links.descriptors if start.links else ())]
        command = [sys.executable, "-m", "vllm.v1.executor", str(theirs.fileno())]
        with starting_child():
            self._process = subprocess.Popen(command, stdin=subprocess.DEVNULL, env=environment, pass_fds=inherited)
        theirs.close()
        if start.links is not None:
            start.links.close()
        start.ends.close()
        # A worker that died at once is noticed when it is waited for.
        with contextlib.suppress(BrokenPipeError):
            self.connection.send_bytes(pickle.dumps(start))

    def ending(self) -> str:
        with contextlib.suppress(subprocess.TimeoutExpired):
            status = self._process.wait(_ENDING_SECONDS)
            return f"its process ended with {f'signal {-status}' if status < 0 else f'exit status {status}'}"
        return "it closed its connection"

    def end(self, deadline: float) -> None:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(max(deadline - time.monotonic(), 0))
        self.kill()

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()


class MultiprocExecutor:
    """Runs the engine core's calls on one worker a rank. A step that fails on any rank ends the engine, because the
    ranks are then out of step.

    Attributes:
        worker, group: rank 0's worker and communicator.
        num_blocks, num_host_blocks: KV blocks on the device and on the host that every rank has.
        state_slots: rows of the state pools.
    """

    host = "127.0.0.1"  # this machine's address, where the ranks meet
    _links: Links | None = None
    _ends: StageEnds = ONLY
    _num_here: int | None = None  # see Worker
    _link_seconds: float | None = None  # see WorkerMonitor

    def __init__(self, config: VllmConfig, use_tqdm: bool = False) -> None:
        world_size = config.parallel_config.tensor_parallel_size
        timeout_seconds = envs.worker_timeout_seconds()
        store = host_store(self.host, world_size)
        handles = self._start_workers(config, store.port)
        self.group: Communicator = Communicator()
        kind = "tensor-parallel rank" if config.parallel_config.pipeline_parallel_size == 1 else "rank"
        self._monitor = WorkerMonitor(handles, timeout_seconds, self._link_seconds, kind)
        self._finalizer = weakref.finalize(self, _end, handles, self._monitor, torch.get_num_threads())
        try:
            torch.set_num_threads(_threads_per_rank(config.parallel_config))
            if self._links is not None:
                self.group = SharedMemoryCommunicator(self._links)
            if self._ends.are_elsewhere or (self._links is None and world_size > 1):
                self._monitor.replies()  # their HELLO
            if self._ends.are_elsewhere:
                self._ends = connect_ends(self._ends, store, 0, self.host)
            if self._links is None and world_size > 1:
                custom = not config.parallel_config.disable_custom_all_reduce
                own_store = dist.PrefixStore(f"stage/{self._ends.index}", store)
                self.group = join_group(own_store, 0, world_size, worker_device(config, 0), self.host, custom)
            self._stage = Stage(self._ends, self.group)
            self._monitor.group, self._monitor.stage = self.group, self._stage
            self.worker = make_worker(config, self.group, self._stage, self._num_here)
            # Upstream's name; callers delete it when they are done.
            self.driver_worker = self.worker
            with self._planned(config, world_size) as plans:
                self.collective_rpc("load_model", (use_tqdm, plans))
            self.state_slots = fewest(self.collective_rpc("determine_state_slots"))
            self.num_blocks = min(self.collective_rpc("determine_num_blocks"))
            self.num_host_blocks = min(self.collective_rpc("determine_num_host_blocks"))
            sizes = self.num_blocks, self.num_host_blocks, self.state_slots
            self.collective_rpc("initialize_kv_cache", sizes)
        except BaseException:
            self.shutdown()
            raise

    @contextlib.contextmanager
    def _planned(self, config: VllmConfig, world_size: int) -> Iterator[dict[int, Plan]]:
        """The work of each stage's ranks on packed weights, by the stage's number: ranks of one machine agree, as they
        cannot ask each other yet. Ranks that are alone find and keep their own."""
        if self._links is None:
            yield {}
            return
        plans: dict[int, Plan] = {}
        with contextlib.ExitStack() as stack:
            for index in range(self._stage.size):
                stage = self._stage if index == self._stage.index else Stage(StageEnds(index, self._stage.size))
                with tensor_parallel(self.group), building_stage(stage):
                    if stage.size > 1:
                        stage.layers = layers_of_stage(config.model_config, stage)
                    plan = planned(config.model_config, config.lora_config is not None, world_size)
                    plans[index] = stack.enter_context(plan)
            yield plans

    def execute_model(self, scheduler_output: SchedulerOutput) -> ModelRunnerOutput:
        """Run one step on every rank; returns rank 0's output. EngineDeadError: a rank failed, now or before."""
        with self._failing_together("execute_model", sendable(scheduler_output)):
            return self.worker.execute_model(scheduler_output)

    def begin_step(self, scheduler_output: SchedulerOutput) -> PendingStep:
        """Begin a step on every rank; its result is rank 0's output. Results are taken in the order of steps, and may
        be taken after the next step has begun. Either raises EngineDeadError: a rank failed, now or before."""
        with self._failing_together("begin_kept_step", sendable(scheduler_output)):
            return _StepOfRanks(self.worker.begin_step(scheduler_output), self._failing_together)

    @contextlib.contextmanager
    def _failing_together(self, method: str, *args: Any) -> Iterator[None]:
        """Let the other ranks do their part of what rank 0 does in the context."""
        with self._failing():
            self._send_step(method, *args)
            yield

    def _send_step(self, method: str, *args: Any) -> None:
        self._monitor.send(STEP, pickle.dumps((method, args, {})))

    @contextlib.contextmanager
    def _failing(self) -> Iterator[None]:
        """An error in the context ends the engine."""
        self._monitor.check()
        try:
            yield
            # An aborted collective's result means nothing.
            self._monitor.check()
        except BaseException as error:
            dead = self._monitor.fail(error)
            if isinstance(error, Exception):
                raise dead from error
            raise

    def collective_rpc(self, method: str | Callable, args: tuple = (), kwargs: dict | None = None) -> list[Any]:
        """Call a method of every worker by name, or a function with the worker as its first argument; one result a
        worker, in the order of ranks. ValueError: the call cannot be pickled for the other ranks; RuntimeError: it
        raised on another rank (the traceback); EngineDeadError: a rank failed, now or before."""
        self._monitor.check()
        call = pickled("collective_rpc", (method, args, kwargs or {}))
        try:
            self._monitor.send(CALL, call)
            result = call_worker(self.worker, method, args, kwargs or {})
        except PeerLostError as error:
            raise self._monitor.fail(error) from error
        except BaseException:
            self._monitor.discard_replies()
            raise
        return [result, *self._monitor.replies()]

    def check_health(self) -> None:
        """Raises EngineDeadError when a rank has failed."""
        self._monitor.check()

    def shutdown(self) -> None:
        """End the workers: ask them to stop, then kill them."""
        self._finalizer()

    def _start_workers(self, config: VllmConfig, store_port: int) -> Sequence[WorkerHandle]:
        """Start the workers of ranks 1 and above; each is to run a WorkerProcess."""
        parallel = config.parallel_config
        world_size, num_stages = parallel.tensor_parallel_size, parallel.pipeline_parallel_size
        if config.device_config.device == "cuda" and world_size > torch.cuda.device_count():
            limit = f"the number of CUDA devices={torch.cuda.device_count()}"
            raise ValueError(f"tensor_parallel_size must be at most {limit}, got {world_size}")
        links: list[Links | None] = [None] * parallel.world_size
        if config.device_config.device == "cpu" and not parallel.disable_custom_all_reduce and world_size > 1:
            links[:] = [each for _ in range(num_stages) for each in make_links(world_size)]
        # The last stage has the first ranks.
        of_numbers = [list(reversed(make_ends(num_stages))) for _ in range(world_size)]
        ends = [of_number[stage] for stage in range(num_stages) for of_number in of_numbers]
        self._links, self._ends = links[0], ends[0]
        store = (self.host, store_port)
        # Custom logits processors may be classes of the user's script; the other ranks need only their number.
        stand_ins = (_OnRankZero,) * len(config.model_config.logits_processors)
        config = replace(config, model_config=replace(config.model_config, logits_processors=stand_ins))
        return [
            LocalWorker(
                WorkerStart(config, rank, world_size, store, self.host, len(ends), os.getpid(), links[rank], ends[rank])
            )
            for rank in range(1, len(ends))
        ]


class _StepOfRanks:
    """A PendingStep of every rank."""

    def __init__(self, own: PendingStep, failing_together: Callable[[str], AbstractContextManager[None]]) -> None:
        self._own, self._failing_together = own, failing_together

    def result(self) -> ModelRunnerOutput:
        with self._failing_together("end_kept_step"):
            return self._own.result()


class _OnRankZero:
    """Stands for a function or class of the user on the other ranks: only rank 0 has it."""

    def __call__(self, *args: Any) -> Any:
        raise RuntimeError("a request's logits_processors run on rank 0")


def sendable(step: SchedulerOutput) -> SchedulerOutput:
    """The step without what the other ranks do not need, such as the requests' functions, most of which cannot be
    pickled."""
    requests = []
    for new in step.scheduled_new_reqs:
        if functions := new.sampling_params.logits_processors:
            params = new.sampling_params.clone()
            params.logits_processors = [_OnRankZero()] * len(functions)
            new = replace(new, sampling_params=params)
        requests.append(new)
    return replace(step, scheduled_new_reqs=requests, parts=step.parts.sendable())


def _threads_per_rank(parallel: ParallelConfig) -> int:
    """OMP_NUM_THREADS, else the rank's share of one process's threads."""
    num_ranks = parallel.world_size * parallel.data_parallel_size
    share = _NUM_THREADS if "OMP_NUM_THREADS" in os.environ else max(_NUM_THREADS // num_ranks, 1)
    return min(share, torch.get_num_threads())


def _end(handles: Sequence[WorkerHandle], monitor: WorkerMonitor, num_threads: int) -> None:
    monitor.stop_watching()
    deadline = time.monotonic() + _STOP_SECONDS
    for handle in handles:
        with contextlib.suppress(OSError):
            handle.connection.send_bytes(STOP)
    for handle in handles:
        handle.end(deadline)
        handle.connection.close()
    monitor.group.close()
    monitor.stage.close()
    torch.set_num_threads(num_threads)
