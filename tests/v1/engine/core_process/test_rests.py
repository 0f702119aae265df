"""A core whose guests wait for something else is woken by the next message."""

from __future__ import annotations

import time
from concurrent.futures import Future
from pathlib import Path
from threading import Timer
from types import SimpleNamespace
from typing import Any

import pytest
import zmq

from vllm.v1.core.guests import Rest
from vllm.v1.engine.core_process import loop
from vllm.v1.engine.core_process.start import STOP, CoreStart


def rest_ends_early(scheduler: Any, seconds: float) -> bool:
    began = time.monotonic()
    scheduler.rest(seconds)
    return time.monotonic() - began < seconds


def test_a_message_ends_a_rest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rests: list[bool] = []

    class Core:
        scheduler, executor = SimpleNamespace(), SimpleNamespace(num_blocks=1)

        def __init__(self, config: Any) -> None:
            self.requests, self.answers = (
                zmq.Context.instance().socket(zmq.PUSH),
                zmq.Context.instance().socket(zmq.PULL),
            )
            self.requests.bind(f"ipc://{tmp_path}/input")
            self.answers.bind(f"ipc://{tmp_path}/output")

        def has_work(self) -> bool:
            rests.append(rest_ends_early(self.scheduler, 0.001))
            self.scheduler.rest.wake()
            rests.append(rest_ends_early(self.scheduler, 60))
            rests.append(rest_ends_early(self.scheduler, 0.001))
            self.requests.send(STOP)
            rests.append(rest_ends_early(self.scheduler, 60))
            return False

        def shutdown(self) -> None:
            self.requests.close(0)
            self.answers.close(0)

    monkeypatch.setattr(loop, "EngineCore", Core)
    monkeypatch.setattr(loop, "read_early", lambda config: None)
    monkeypatch.setattr(loop, "gc", SimpleNamespace(freeze=lambda: None))
    config: Any = SimpleNamespace(model_config=None, parallel_config=SimpleNamespace(world_size=1))
    addresses = f"ipc://{tmp_path}/input", f"ipc://{tmp_path}/output"
    assert loop.CoreProcess(CoreStart(config, str(tmp_path), *addresses, "")).run() == 0
    # Nothing had come; a guest's future was done; that counts once; a message had come.
    assert rests == [False, True, False, True]


def test_what_is_done_ends_a_rest_that_began_before_it() -> None:
    rest: Future[None] = Future()
    scheduler = SimpleNamespace(rest=Rest())
    rest.add_done_callback(scheduler.rest.wake)
    Timer(0.01, rest.set_result, (None,)).start()
    assert rest_ends_early(scheduler, 60)
    assert not rest_ends_early(scheduler, 0.001)
