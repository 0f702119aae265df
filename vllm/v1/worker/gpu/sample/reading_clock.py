"""How long a step reads logits for logprobs, without waiting for the device."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager

import torch


class ReadingClock:
    """Adds up the time of the passes that read logits. On CUDA it is the device's own time, between two events in
    its queue; what the device has not done yet is left for a later `take`."""

    def __init__(self) -> None:
        self._seconds = self._began = 0.0
        self._pending: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []

    def running(self, device: torch.device) -> AbstractContextManager[None]:
        """Time what is done, or queued on the device's current stream, inside."""
        return self._on_device() if device.type == "cuda" else self

    def __enter__(self) -> None:
        self._began = time.perf_counter()

    def __exit__(self, *error: object) -> None:
        if error[0] is None:
            self._seconds += time.perf_counter() - self._began

    @contextmanager
    def _on_device(self) -> Iterator[None]:
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        yield
        end.record()
        self._pending.append((begin, end))

    def take(self) -> float:
        """Seconds since the last take."""
        seconds, self._seconds = self._seconds, 0.0
        pending, self._pending = self._pending, []
        for begin, end in pending:
            if end.query():
                seconds += begin.elapsed_time(end) / 1000
            else:
                self._pending.append((begin, end))
        return seconds
