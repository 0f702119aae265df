"""Kernel calls recorded once and made again from one operator: on the CPU what a CUDA graph is there.

PyTorch takes some microseconds to reach an operator, a layer has ten of them, and with a few tokens in a step that is a
good part of its time. The C++ operators write down the calls of their kernels, which hold nothing but addresses.
"""

from __future__ import annotations

import weakref

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from vllm.ops._dispatch import implementation

# They allocate and write nothing: what an operator fills is kept by its recorded call.
_ALLOCATIONS = {torch.ops.aten.empty.memory_format, torch.ops.aten.new_empty.default}


class _Observer(TorchDispatchMode):
    """Notes whether anything ran that the recording lacks."""

    def __init__(self) -> None:
        super().__init__()
        self.missed: set[str] = set()

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        # What skips torch.compile's frontend loads it first: two seconds, in the first decode step.
        return False

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        if func.namespace != "vllm_cpu" and not func.is_view and func not in _ALLOCATIONS:
            self.missed.add(str(func))
        return func(*args, **kwargs or {})


def can_record(tensor: Tensor) -> bool:
    """Whether operations on `tensor` can be recorded."""
    return implementation(tensor) == "cpp"


class Recording:
    """Use as a context: what runs within runs as ever and is recorded; `replay` runs it again.

        with Recording() as recording:
            out = forward(inputs)
        inputs.copy_(others)
        recording.replay()  # fills `out`

    The tensors keep their places: a replay reads and writes the very memory that the recorded calls did, which the
    recording keeps alive. Shapes, strides and numbers among the arguments are those of the recorded calls.

    Attributes:
        missed: the operations that ran and are not in the recording. Unless there are none, do not replay.
    """

    def __init__(self) -> None:
        self._observer = _Observer()
        self._handle = 0

    def __enter__(self) -> Recording:
        self._handle = torch.ops.vllm_cpu.start_recording()
        # At the interpreter's end the operators may be gone before the recordings.
        weakref.finalize(self, torch.ops.vllm_cpu.free_recording, self._handle).atexit = False
        self._observer.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        self._observer.__exit__(*error)
        torch.ops.vllm_cpu.stop_recording()

    @property
    def missed(self) -> frozenset[str]:
        """See the class."""
        return frozenset(self._observer.missed)

    def replay(self) -> None:
        """Make the recorded calls, in order."""
        assert self._handle and not self.missed
        torch.ops.vllm_cpu.replay_recording(self._handle)
