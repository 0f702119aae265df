"""CUDA alone: a stream that copies results to the host, and graphs."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor

from vllm.distributed.communicator import ALONE, Communicator

Result = TypeVar("Result")
Cut = Callable[[], None]
"""Ends the piece that is captured, and begins the next one."""


class Movable(Protocol):
    """Results of a step that hold tensors."""

    def moved(self, move: Callable[[Tensor], Tensor]) -> Any:
        """The results with `move` applied to the tensors."""


Given = TypeVar("Given", bound=Movable)


class HostCopies:
    """Copies results to pinned host memory on a stream of its own. The host waits only for the copy that it takes."""

    def __init__(self, device: torch.device, group: Communicator) -> None:
        """`group` is told when the host waits."""
        self._device, self._group = device, group
        self._stream = torch.cuda.Stream(device)

    def start(self, output: Given) -> Callable[[], Given]:
        """Copy what the current stream computes; the returned function waits for the copy and returns it."""
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            copy = output.moved(_to_pinned)
            done = self._stream.record_event()

        def take(source: Given = output) -> Given:
            # `source` keeps its memory from being reused by the computing stream until the copy is done.
            with self._group.waiting_for_device():
                done.synchronize()
            # Users may keep readings for long, and pinned memory is for the next step.
            return copy.moved(torch.clone)

        return take

    def fence(self) -> None:
        """Make later work on the current stream wait for all copies: it may overwrite what they read."""
        torch.cuda.current_stream(self._device).wait_stream(self._stream)


class GraphRecorder:
    """Captures graphs that share their memory: only one may run at a time."""

    def __init__(self, device: torch.device, group: Communicator = ALONE) -> None:
        """`group` counts the collectives of replays, too: its ranks record and replay alike."""
        self._device, self._group = device, group
        self._stream = torch.cuda.Stream(device)
        self._pool = torch.cuda.graph_pool_handle()

    def record(self, function: Callable[[], Result]) -> tuple[Result, Callable[[], None]]:
        """Capture the device work of `function`, which is called twice, on tensors that stay in place. Returns the
        captured call's result, and the replay, on the current stream, that writes it again."""
        result, (replay,) = self.record_pieces(lambda cut: function())
        return result, replay

    def record_pieces(self, function: Callable[[Cut], Result]) -> tuple[Result, list[Callable[[], None]]]:
        """As `record`, in pieces: `function` calls what it is given between two of them. What is done between their
        replays must leave in place what the later ones read."""
        # The first call compiles kernels and sets up libraries, which a capture does not allow.
        function(lambda: None)
        torch.cuda.synchronize(self._device)
        graphs: list[torch.cuda.CUDAGraph] = []

        def begin() -> None:
            graphs.append(torch.cuda.CUDAGraph())
            # Other threads may use the device meanwhile.
            graphs[-1].capture_begin(pool=self._pool, capture_error_mode="thread_local")

        def cut() -> None:
            graphs[-1].capture_end()
            begin()

        with torch.cuda.stream(self._stream), _no_garbage_collection():
            begin()
            num_calls, num_bytes = self._group.num_calls.copy(), self._group.num_bytes.copy()
            try:
                result = function(cut)
            finally:
                graphs[-1].capture_end()
        calls, size = self._group.num_calls - num_calls, self._group.num_bytes - num_bytes
        first, *others = (graph.replay for graph in graphs)
        return result, [self._counting(first, calls, size), *others]

    def _counting(
        self, replay: Callable[[], None], num_calls: Mapping[str, int], num_bytes: Mapping[str, int]
    ) -> Callable[[], None]:
        if not num_calls:
            return replay

        def counted() -> None:
            self._group.count_again(num_calls, num_bytes)
            replay()

        return counted


def host_copies(device: torch.device, group: Communicator = ALONE) -> HostCopies | None:
    """None on the CPU, where results are on the host."""
    return HostCopies(device, group) if device.type == "cuda" else None


def graph_recorder(device: torch.device, group: Communicator = ALONE) -> GraphRecorder | None:
    """None on the CPU, which has no graphs."""
    return GraphRecorder(device, group) if device.type == "cuda" else None


@contextlib.contextmanager
def _no_garbage_collection() -> Iterator[None]:
    """Collecting a discarded engine frees graphs and memory, which could break a capture."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def _to_pinned(tensor: Tensor) -> Tensor:
    # The pinned allocator reuses the memory only when the copy is done.
    host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    return host.copy_(tensor, non_blocking=True)
