"""Engines on a Ray cluster that are lost, do not load, or cannot hear from the cluster's head."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from tiny_llm import make_tiny_model

from vllm.engine.arg_utils import EngineArgs

pytest.importorskip("ray", reason="Ray is not installed (pip install 'ray[data]')")

POISON = 3
BATCHES = [(part, b"text") for part in range(6)]


@dataclass(frozen=True)
class Job:
    """See FileJob; a batch ends its engine (once, if a file is to say so), or none loads."""

    engine_args: EngineArgs
    loads: bool = True
    once: Path | None = None

    def make_scorer(self, llm: Any) -> str:
        if not self.loads:
            raise RuntimeError("out of everything")
        return "scorer"

    def score(self, scorer: str, part: int, items: bytes) -> tuple[int, str, bytes]:
        if part == POISON and not (self.once and self.once.exists()):
            if self.once:
                self.once.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return part, scorer, items


@pytest.fixture(scope="module")
def engine_args(tmp_path_factory: pytest.TempPathFactory) -> EngineArgs:
    folder = make_tiny_model(tmp_path_factory.mktemp("tiny"))
    return EngineArgs(model=str(folder), dtype="float32", max_model_len=128)


@pytest.fixture
def ray_engines(ray_cluster: str, monkeypatch: pytest.MonkeyPatch) -> Any:
    from vllm.scoring import ray_engines

    monkeypatch.setattr(ray_engines, "MAX_LOSSES", 1)
    return ray_engines


def test_a_batch_that_ends_its_engines_ends_the_run(ray_engines: Any, engine_args: EngineArgs) -> None:
    results = []
    with ray_engines.RayEngines(Job(engine_args), replicas=1, cpus=1) as engines:
        running: Iterator[Any] = engines.results(iter(BATCHES))
        with pytest.raises(
            ray_engines.EnginesLostError, match=f"2 engines were lost with batch {POISON}, the last one: "
        ):
            results.extend(iter(lambda: next(running), None))
    assert results == [(part, "scorer", b"text") for part in range(POISON)]


def test_batches_of_the_last_engine_are_scored_when_there_is_nothing_else_to_read(
    ray_engines: Any, engine_args: EngineArgs, tmp_path: Path
) -> None:
    job = Job(engine_args, once=tmp_path / "once")
    with ray_engines.RayEngines(job, replicas=1, cpus=1) as engines:
        results = list(engines.results(iter(BATCHES[: POISON + 1])))
    assert results == [(part, "scorer", b"text") for part in range(POISON + 1)]


def test_engines_that_do_not_load_end_the_run(ray_engines: Any, engine_args: EngineArgs) -> None:
    with (
        ray_engines.RayEngines(Job(engine_args, loads=False), replicas=1, cpus=1) as engines,
        pytest.raises(ray_engines.EnginesLostError, match="2 engines in a row did not load, .*out of everything"),
    ):
        next(engines.results(iter(BATCHES)))


def test_a_head_that_does_not_answer_ends_the_run(
    ray_engines: Any, engine_args: EngineArgs, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ray_engines, "_ASK_SECONDS", 0.01)
    monkeypatch.setattr(ray_engines, "_HEAD_SECONDS", 0.3)
    with ray_engines.RayEngines(Job(engine_args), replicas=1, cpus=1) as engines:
        monkeypatch.delattr(ray_engines.ray, "nodes")
        with pytest.raises(ray_engines.EnginesLostError, match="for 0.3 s its head has not answered"):
            list(engines.results(iter([(POISON, b"text")])))
