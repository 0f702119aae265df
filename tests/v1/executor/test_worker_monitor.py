"""Who counts as failed, among workers that only pretend."""

from __future__ import annotations

import contextlib
import pickle
import threading
import time
from collections.abc import Callable, Iterator
from multiprocessing import Pipe
from types import SimpleNamespace
from typing import Any

import pytest

from vllm.distributed.communicator import Communicator
from vllm.exceptions import EngineDeadError
from vllm.v1.core.sched.output import CachedRequestData, SchedulerOutput
from vllm.v1.executor import worker_monitor
from vllm.v1.executor.multiproc import MultiprocExecutor
from vllm.v1.executor.worker_monitor import WorkerMonitor
from vllm.v1.executor.worker_proc import BEAT, FAILED, Progress


class Actor:
    """A worker that says what the test wants; see WorkerHandle."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.connection, self._own = Pipe()
        self.is_killed = False

    def say(self, *message: Any) -> None:
        # The monitor may have ended it.
        with contextlib.suppress(OSError):
            self._own.send_bytes(pickle.dumps(message))

    def ending(self) -> str:
        return "it left the stage"

    def end(self, deadline: float) -> None:
        self.kill()

    def kill(self) -> None:
        self.is_killed = True
        self._own.close()


@pytest.fixture
def actors(monkeypatch: pytest.MonkeyPatch) -> list[Actor]:
    monkeypatch.setattr(worker_monitor, "_TICK_SECONDS", 0.05)
    monkeypatch.setattr(worker_monitor, "_STALL_SECONDS", 1.0)
    return [Actor(1), Actor(2)]


@pytest.fixture
def monitor(actors: list[Actor]) -> Iterator[WorkerMonitor]:
    monitor = WorkerMonitor(actors, timeout_seconds=4.0)
    monitor.group = Communicator()
    yield monitor
    monitor.stop_watching()


def failure_of(monitor: WorkerMonitor, seconds: float, meanwhile: Callable[[float], None] = lambda _: None) -> str:
    """The failure that the monitor reports within so many seconds; "" when it has nothing to say."""
    began = time.monotonic()
    while (passed := time.monotonic() - began) < seconds:
        meanwhile(passed)
        try:
            monitor.check()
        except EngineDeadError as error:
            return str(error)
        time.sleep(0.05)
    return ""


def test_one_that_computes_may_keep_the_others_waiting(actors, monitor):
    monitor.group.is_waiting = True

    def beat(passed: float) -> None:
        actors[0].say(BEAT, Progress(7, cpu_seconds=passed, is_waiting=False))
        actors[1].say(BEAT, Progress(8, cpu_seconds=0.5, is_waiting=True))

    assert failure_of(monitor, 1.8, beat) == ""

    def idle(_: float) -> None:
        actors[0].say(BEAT, Progress(7, cpu_seconds=3.0, is_waiting=False, stack="in its bed\n"))
        # Waiting may take time of the CPU, too.
        actors[1].say(BEAT, Progress(8, cpu_seconds=time.monotonic(), is_waiting=True, stack="at the door\n"))

    message = failure_of(monitor, 8.0, idle)
    assert message.startswith("the step hangs: no rank has done anything for 1 s")
    assert "rank 1 is at:\nin its bed" in message and "at the door" not in message
    assert actors[0].is_killed and actors[1].is_killed


def test_computing_has_a_limit(actors, monitor):
    monitor.group.is_waiting = True
    message = failure_of(monitor, 8.0, lambda passed: actors[0].say(BEAT, Progress(7, cpu_seconds=passed)))
    assert message.startswith("the step hangs: no rank has got on for VLLM_WORKER_TIMEOUT_S=4")


def test_rank_0_may_take_its_time(actors, monitor):
    """In a user's processor, or in a debugger."""
    assert failure_of(monitor, 2.0, lambda _: [each.say(BEAT, Progress(3, 0.1, True)) for each in actors]) == ""


def test_the_first_cause_is_told(actors, monitor):
    actors[1].say(FAILED, "lost rank 1", True)
    time.sleep(0.1)
    actors[0].say(FAILED, "a bad weight", False)
    assert failure_of(monitor, 8.0) == "tensor-parallel rank 1 failed:\na bad weight"


def test_a_message_that_cannot_be_read(actors, monitor):
    actors[0].say("nonsense", *"abc")
    actors[0].say(BEAT)
    assert failure_of(monitor, 8.0).startswith("a worker's message cannot be read: ")


def test_one_on_another_machine_has_the_time_of_the_link(actors):
    """And rank 0, which waits for it in a collective, is released: nothing else would tell it."""
    monitor = WorkerMonitor(actors, timeout_seconds=4.0, link_seconds=1.5)
    released = threading.Event()
    monitor.group = Communicator()
    monitor.group.disconnect = released.set
    for each in actors:
        each.say(BEAT, Progress())
    message = failure_of(monitor, 8.0, lambda _: actors[0].say(BEAT, Progress()))
    assert message == (
        "tensor-parallel rank 2 cannot be reached or hangs: it gives no sign of life for VLLM_WORKER_LINK_TIMEOUT_S=1.5"
    )
    assert released.is_set() and actors[0].is_killed and actors[1].is_killed
    monitor.stop_watching()


def test_one_that_goes_without_a_word(actors, monitor):
    actors[1].kill()
    assert failure_of(monitor, 8.0) == "tensor-parallel rank 2 has gone: it left the stage"
    assert actors[0].is_killed


def test_a_pause_of_all_processes_is_nobodys_fault(actors, monitor, monkeypatch):
    monitor.stop_watching()
    for each in actors:
        each.say(BEAT, Progress())
    monitor._take_messages(1.0)
    clock = time.monotonic() + 300
    monkeypatch.setattr(worker_monitor.time, "monotonic", lambda: clock)
    assert monitor._find_hang() == []
    clock += 2  # the processes go on, but nothing has come from them yet
    assert monitor._find_hang() == []
    clock += 2
    assert monitor._find_hang() == []
    clock += 2.9
    assert monitor._find_hang() == []
    clock += 2.9
    (fault,) = monitor._find_hang()
    assert fault.message == "tensor-parallel rank 1, 2 hangs: it gives no sign of life"


class Device(Communicator):
    """Rank 0's group on a device whose collective ends only when it is aborted, if then."""

    def __init__(self, obeys: bool = True) -> None:
        super().__init__()
        self._obeys = obeys
        self._ended = threading.Event()

    def abort(self) -> None:
        if self._obeys:
            self._ended.set()

    def synchronize(self) -> None:
        with self.waiting_for_device():
            assert self._ended.wait(20)


def test_a_device_that_waits_for_a_lost_rank_is_released(actors, monitor):
    """Nothing on the device notices that the other rank has gone; what it gives after the abort is no output."""
    monitor.group = device = Device()

    def execute_model(step: Any) -> str:
        actors[0].kill()
        device.synchronize()
        return "garbage"

    executor = MultiprocExecutor.__new__(MultiprocExecutor)
    executor._monitor, executor.worker = monitor, SimpleNamespace(execute_model=execute_model)
    step = SchedulerOutput([], CachedRequestData(), {}, 0, [], [])
    with pytest.raises(EngineDeadError, match="rank 1 has gone: it left the stage"):
        executor.execute_model(step)
    with pytest.raises(EngineDeadError, match="rank 1 has gone"):
        executor.execute_model(step)


def test_a_device_that_does_not_come_back_ends_the_process(actors, monitor, monkeypatch):
    monkeypatch.setattr(worker_monitor, "_RELEASE_SECONDS", 0.3)
    exits: list[int] = []
    monkeypatch.setattr(worker_monitor.os, "_exit", lambda status: (exits.append(status), device._ended.set()))
    monitor.group = device = Device(obeys=False)
    actors[1].kill()
    device.synchronize()
    assert exits[0] == 1


def test_devices_may_compute_for_long_but_not_for_ever(actors, monitor):
    monitor.group.is_waiting = monitor.group.waits_for_device = True

    def beat(_: float) -> None:
        for each in actors:
            each.say(BEAT, Progress(7, 0.5, True, True))

    monitor.group.abort = lambda: monitor.group.__dict__.update(waits_for_device=False)
    began = time.monotonic()
    assert "VLLM_WORKER_TIMEOUT_S=4" in failure_of(monitor, 9.0, beat)
    assert time.monotonic() - began > 3.5
