"""Kernel calls recorded once and replayed by one operator: the CPU's counterpart of a CUDA graph. Or deferred, and made
by one operator: its counterpart of a stream.

PyTorch takes some microseconds to reach an operator, which is much of a small decode step; and after a kernel with many
rows, which leaves nothing of Python and PyTorch in the caches, more than a hundred, while OpenMP's threads fall asleep.
The C++ operators record the calls of their kernels, which hold nothing but addresses.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from vllm.ops._dispatch import implementation

# They allocate and write nothing.
_ALLOCATIONS = {torch.ops.aten.empty.memory_format, torch.ops.aten.new_empty.default}


class RecordedMemory:
    """Memory for the results of recorded calls. Recordings may share it: it is then as large as the largest needs, and
    a replay of one overwrites the results of the others."""

    def __init__(self) -> None:
        self.handle: int = torch.ops.vllm_cpu.make_recorded_memory()
        # At the interpreter's end the operators may be gone before the memory.
        weakref.finalize(self, torch.ops.vllm_cpu.free_recorded_memory, self.handle).atexit = False


class _Observer(TorchDispatchMode):
    """Allocates from the recording's memory; notes what ran that the recording lacks."""

    def __init__(self) -> None:
        super().__init__()
        self.missed: set[str] = set()
        self.before: list[Callable[[], object]] = []  # calls of the host before the first kernel's
        self.after: list[Callable[[], object]] = []  # and after the last one's
        self._has_kernels = self._is_with_host = False

    def call_host(self, call: Callable[[], object]) -> None:
        self._is_with_host = True
        try:
            call()
        finally:
            self._is_with_host = False
        (self.after if self._has_kernels else self.before).append(call)

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        # True would load torch.compile's frontend: two seconds, in the first decode step.
        return False

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        kwargs = kwargs or {}
        if self._is_with_host:
            return func(*args, **kwargs)
        if func in _ALLOCATIONS:
            return _allocate(func, *args, **kwargs)
        result = func(*args, **kwargs)
        if func.namespace == "vllm_cpu":
            self._has_kernels = True
            if self.after:
                self.missed.add(f"{func} after a call of the host")
        elif not (func.is_view and _shares_memory(result, args[0])):
            self.missed.add(str(func))
        return result


_observer: ContextVar[_Observer | Deferral | None] = ContextVar("observer", default=None)


def call_host(call: Callable[[], object]) -> None:
    """Make a call that is no kernel's, such as one that waits for another process. A recording that is being made
    repeats it in every replay, before its first kernel or after its last; deferred kernels run before it."""
    observer = _observer.get()
    if observer is None:
        call()
    else:
        observer.call_host(call)


def _shares_memory(result: Any, source: Any) -> bool:
    """Whether a view's result, a tensor or several, is one: `contiguous` and others copy where they have to."""
    tensors = [result] if isinstance(result, Tensor) else result
    start = source.untyped_storage().data_ptr()
    return all(each.untyped_storage().data_ptr() == start for each in tensors)


def _allocate(func: Any, *args: Any, dtype: torch.dtype | None = None, **others: Any) -> Tensor:
    """`empty(size)` or `new_empty(like, size)`, contiguous, on the CPU."""
    size = args[-1]
    if 0 in size:
        # Such tensors may be kept for their dtype, and would keep the recording's memory.
        empty: Tensor = func(*args, dtype=dtype, **others)
        return empty
    if dtype is None:
        dtype = args[0].dtype if isinstance(args[0], Tensor) else torch.get_default_dtype()
    memory = torch.ops.vllm_cpu.recorded_bytes(math.prod(size) * dtype.itemsize)
    return memory.view(dtype).view(size)


def can_record(tensor: Tensor) -> bool:
    """Whether operations on `tensor` can be recorded."""
    return implementation(tensor) == "cpp"


class Recording:
    """Use as a context: operations within run as usual and are recorded; `replay` runs them again.

        with Recording() as recording:
            out = forward(inputs)
        inputs.copy_(others)
        recording.replay()  # fills `out`

    A replay reads and writes the memory that the recorded calls did, which the recording keeps alive. Shapes, strides
    and numbers among the arguments stay those of the recorded calls. Memory of a tensor that is freed while the
    recording is made is reused by the next ones: only the tensors that are left at the end are valid. Results are
    written to `memory`; None: memory of its own.
    """

    def __init__(self, memory: RecordedMemory | None = None) -> None:
        self._observer = _Observer()
        self._memory = memory or RecordedMemory()
        self._handle = 0

    def __enter__(self) -> Recording:
        self._handle = torch.ops.vllm_cpu.start_recording(self._memory.handle)
        # At the interpreter's end the operators may be gone before the recordings.
        weakref.finalize(self, torch.ops.vllm_cpu.free_recording, self._handle).atexit = False
        self._observer.__enter__()
        self._token = _observer.set(self._observer)
        return self

    def __exit__(self, *error: object) -> None:
        _observer.reset(self._token)
        self._observer.__exit__(*error)
        torch.ops.vllm_cpu.stop_recording()

    @property
    def missed(self) -> frozenset[str]:
        """The operations that ran and are not in the recording. Unless there are none, do not replay."""
        return frozenset(self._observer.missed)

    def replay(self) -> None:
        """Make the recorded calls, in order."""
        assert self._handle and not self.missed
        for call in self._observer.before:
            call()
        torch.ops.vllm_cpu.replay_recording(self._handle)
        for call in self._observer.after:
            call()


class Deferral(TorchDispatchMode):
    """Use as a context: kernels that are called within run together at its end, or before an operation of PyTorch's
    that may need their results.

        with Deferral(memory):
            out = forward(inputs)

    Kernels run in order, so memory of a tensor that is freed is reused by the next ones. Results are valid until the
    next recording or deferral in `memory`. What reads a tensor and is no operation, such as `tolist`, finds results of
    kernels that have not run yet.
    """

    def __init__(self, memory: RecordedMemory) -> None:
        super().__init__()
        self._memory = memory

    def __enter__(self) -> Deferral:
        self._handle = torch.ops.vllm_cpu.start_recording(self._memory.handle, True)
        self._token = _observer.set(self)
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        _observer.reset(self._token)
        torch.ops.vllm_cpu.stop_recording()
        try:
            if error[0] is None:
                self._flush()
        finally:
            torch.ops.vllm_cpu.free_recording(self._handle)

    def _flush(self) -> None:
        torch.ops.vllm_cpu.flush_recording(self._handle)

    def call_host(self, call: Callable[[], object]) -> None:
        self._flush()
        call()

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # as _Observer's

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        kwargs = kwargs or {}
        if func.namespace == "vllm_cpu":
            return func(*args, **kwargs)
        if func in _ALLOCATIONS:
            return _allocate(func, *args, **kwargs)
        if func.is_view:
            result = func(*args, **kwargs)
            if _shares_memory(result, args[0]):
                return result
        self._flush()
        return func(*args, **kwargs)
