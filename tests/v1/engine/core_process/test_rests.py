"""A core whose guests wait for something else is woken by the next message."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import zmq

from vllm.v1.engine.core_process import loop
from vllm.v1.engine.core_process.start import STOP, CoreStart


def test_a_message_ends_a_rest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rests: list[int] = []

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
            rests.append(self.scheduler.rest(0.001))
            self.requests.send(STOP)
            rests.append(self.scheduler.rest(60))
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
    # Nothing had come, and then something had.
    assert [bool(each) for each in rests] == [False, True]
