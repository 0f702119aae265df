"""Engines on a Ray cluster that are lost, do not load, or cannot hear from the cluster's head."""

from __future__ import annotations

import os
import signal
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
from tiny_llm import make_tiny_model

from vllm.engine.arg_utils import EngineArgs

pytest.importorskip("ray", reason="Ray is not installed (pip install 'ray[data]')")

POISON = 3
BATCHES = [(part, b"text") for part in range(6)]


@dataclass(frozen=True)
class Job:
    """See FileJob; a batch ends its engine, or none loads."""

    engine_args: EngineArgs
    loads: bool = True

    def make_scorer(self, llm: Any) -> str:
        if not self.loads:
            raise RuntimeError("out of everything")
        return "scorer"

    def score(self, scorer: str, part: int, items: bytes) -> tuple[int, str, bytes]:
        if part == POISON:
            os.kill(os.getpid(), signal.SIGKILL)
        return part, scorer, items


@pytest.fixture(scope="module")
def engine_args(tmp_path_factory: pytest.TempPathFactory) -> EngineArgs:
    folder = make_tiny_model(tmp_path_factory.mktemp("tiny"))
    return EngineArgs(model=str(folder), dtype="float32", max_model_len=128)


@pytest.fixture
def ray_engines(ray_cluster: str, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The module, imported once there is a cluster: Ray reads some of its settings then."""
    from vllm.scoring import ray_engines

    monkeypatch.setattr(ray_engines, "MAX_LOSSES", 1)
    return ray_engines


def test_a_batch_that_ends_its_engines_ends_the_run(ray_engines: Any, engine_args: EngineArgs) -> None:
    results = []
    with ray_engines.RayEngines(Job(engine_args), replicas=1, cpus=1) as engines:
        running = engines.results(iter(BATCHES))
        with pytest.raises(
            ray_engines.EnginesLostError, match=f"2 engines were lost with batch {POISON}, the last one: "
        ):
            results.extend(iter(lambda: next(running), None))
    assert results == [(part, "scorer", b"text") for part in range(POISON)]


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
            list(engines.results(iter(BATCHES)))


def test_the_last_batches_of_the_only_engine_are_waited_for_when_it_is_lost(
    ray_engines: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def start(self: Any) -> None:
        self._engines.append(ray_engines._Engine(actor=None, bundles=None))

    monkeypatch.setattr(ray_engines.RayEngines, "_start", start)
    monkeypatch.setattr(ray_engines, "call_within", lambda *_: None)
    job = SimpleNamespace(engine_args=SimpleNamespace(device="cpu", tensor_parallel_size=1))
    engines = ray_engines.RayEngines(job, replicas=1, cpus=1.0)
    engines._start()
    (lost,) = engines._engines
    lost.is_loaded, lost.batches, engines._is_exhausted = True, [(7, b"a"), (8, b"b")], True
    engines._replace(lost, "its node is gone")

    assert engines._feed(iter(())), "no engine is loaded, and two batches have no result"
    assert list(engines._again) == [(7, b"a"), (8, b"b")]
