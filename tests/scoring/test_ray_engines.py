"""Batches of engines that are lost."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

ray = pytest.importorskip("ray")

from vllm.scoring import ray_engines  # noqa: E402
from vllm.scoring.ray_engines import RayEngines  # noqa: E402


@pytest.fixture
def engines(monkeypatch: pytest.MonkeyPatch) -> RayEngines:
    """One engine, which is never started."""

    def start(self: RayEngines) -> None:
        self._engines.append(ray_engines._Engine(actor=None))

    monkeypatch.setattr(ray, "cluster_resources", dict)
    monkeypatch.setattr(RayEngines, "_start", start)
    monkeypatch.setattr(ray_engines, "call_within", lambda *_: None)
    job: Any = SimpleNamespace(engine_args=SimpleNamespace(device="cpu", tensor_parallel_size=1))
    made = RayEngines(job, replicas=1, cpus=1.0)
    made._start()
    return made


def test_the_last_batches_of_the_only_engine_are_waited_for_when_it_is_lost(engines: RayEngines) -> None:
    (lost,) = engines._engines
    lost.is_loaded, lost.batches, engines._is_exhausted = True, [(7, b"a"), (8, b"b")], True
    engines._replace(lost, "its node is gone")

    assert engines._feed(iter(())), "no engine is loaded, and two batches have no result"
    assert list(engines._again) == [(7, b"a"), (8, b"b")]
