"""What only CUDA has: a stream that copies results beside the one that computes, and graphs."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable, Iterator
from typing import TypeVar

import torch

from vllm.v1.worker.gpu.sample.output import SamplerOutput

Result = TypeVar("Result")


class HostCopies:
    """Copies results to pinned host memory on a stream of its own. The host waits only for what it takes."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)

    def start(self, output: SamplerOutput) -> Callable[[], SamplerOutput]:
        """Copy what the current stream computes; the returned call waits for the copy and gives it."""
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            copy = output.moved(_to_pinned)
            done = self._stream.record_event()

        def take(source: SamplerOutput = output) -> SamplerOutput:
            # `source` is kept until then: its memory belongs to the stream that computes, which could give it away.
            done.synchronize()
            # Users may keep readings for long, and pinned memory is for the next step.
            return copy.moved(torch.clone)

        return take

    def fence(self) -> None:
        """Let what comes next on the current stream begin when all copies are done: it may write what they read."""
        torch.cuda.current_stream(self._device).wait_stream(self._stream)


class GraphRecorder:
    """Records graphs that share their memory, so that one alone may run at a time."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)
        self._pool = torch.cuda.graph_pool_handle()

    def record(self, function: Callable[[], Result]) -> tuple[Result, Callable[[], None]]:
        """Record what `function` does to the device.

        Args:
            function: works on tensors that stay where they are; is called twice.

        Returns:
            what the second call returned, and the replay, on the current stream, that writes it anew.
        """
        # Kernels are compiled, and libraries set up, where that is allowed.
        function()
        torch.cuda.synchronize(self._device)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.stream(self._stream), _no_garbage_collection():
            # Other threads may use the device meanwhile.
            graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
            try:
                result = function()
            finally:
                graph.capture_end()
        return result, graph.replay


def host_copies(device: torch.device) -> HostCopies | None:
    """What brings results to the host; None: they are there."""
    return HostCopies(device) if device.type == "cuda" else None


def graph_recorder(device: torch.device) -> GraphRecorder | None:
    """What records graphs; None: the device has none."""
    return GraphRecorder(device) if device.type == "cuda" else None


@contextlib.contextmanager
def _no_garbage_collection() -> Iterator[None]:
    """An engine that was given up holds graphs and memory, whose end in the middle of a capture could end that, too."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def _to_pinned(tensor: torch.Tensor) -> torch.Tensor:
    # The host's allocator hands the memory out again only when the copy is done.
    host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    return host.copy_(tensor, non_blocking=True)
