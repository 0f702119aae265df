"""The time of readings: on CPU by the host's clock, on CUDA by events that nobody waits for."""

from __future__ import annotations

import time

import pytest
import torch

from vllm.v1.worker.gpu.sample.logprob import ReadingClock

CPU, CUDA = torch.device("cpu"), torch.device("cuda")


class FakeEvent:
    """An event of a queue that runs when the test says so."""

    clock_ms = 0.0
    is_done = False

    def __init__(self, enable_timing: bool) -> None:
        assert enable_timing
        self.at = None

    def record(self) -> None:
        self.at = FakeEvent.clock_ms

    def query(self) -> bool:
        return FakeEvent.is_done

    def elapsed_time(self, end: FakeEvent) -> float:
        assert FakeEvent.is_done, "this would wait for the device, or raise"
        return end.at - self.at


def test_host_time_adds_up_and_is_taken_once():
    clock = ReadingClock()
    began = time.perf_counter()
    for _ in range(2):
        with clock.running(CPU):
            time.sleep(0.01)
    total = time.perf_counter() - began
    assert 0.02 <= clock.take() <= total
    assert clock.take() == 0.0


def test_device_time_is_taken_when_the_device_is_done(monkeypatch):
    monkeypatch.setattr(torch.cuda, "Event", FakeEvent)
    monkeypatch.setattr(FakeEvent, "clock_ms", 5.0)
    clock = ReadingClock()
    for milliseconds in (30.0, 12.0):
        with clock.running(CUDA):
            monkeypatch.setattr(FakeEvent, "clock_ms", FakeEvent.clock_ms + milliseconds)
    assert clock.take() == 0.0
    monkeypatch.setattr(FakeEvent, "is_done", True)
    assert clock.take() == pytest.approx(0.042)
    assert clock.take() == 0.0


def test_what_fails_is_not_counted():
    clock = ReadingClock()
    with pytest.raises(RuntimeError, match="broken"), clock.running(CPU):
        raise RuntimeError("broken")
    assert clock.take() == 0.0
