"""How long a step reads logits for logprobs, without waiting for the device."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch


class ReadingClock:
    """Adds up the time of the passes that read logits; on CUDA the device's time between two events in its queue."""

    def __init__(self) -> None:
        self._seconds = 0.0
        self._pending: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []

    @contextmanager
    def running(self, device: torch.device) -> Iterator[None]:
        """Time the work done, or queued on the device's current stream, in the context."""
        if device.type == "cuda":
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            begin.record()
            yield
            end.record()
            self._pending.append((begin, end))
        else:
            started = time.perf_counter()
            yield
            self._seconds += time.perf_counter() - started

    def take(self) -> float:
        """Seconds since the last take; CUDA work that is not done yet counts at a later one."""
        seconds, self._seconds = self._seconds, 0.0
        pending, self._pending = self._pending, []
        for begin, end in pending:
            if end.query():
                seconds += begin.elapsed_time(end) / 1000
            else:
                self._pending.append((begin, end))
        return seconds
