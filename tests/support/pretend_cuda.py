"""CUDA without a GPU: a device that computes on the CPU but keeps apart from it, with torch.cuda's streams and graphs.

Tensors of the pretended device hold CPU tensors and say that they are on "cuda". An operation that mixes them with the
CPU's is an error, as on a GPU. So is, where the test says so with torch.cuda.set_sync_debug_mode("error"), and always
while a graph is captured, what would make the host wait: bringing anything to the host, an operation whose result's
shape depends on values, a copy from or to memory that is not pinned.

Triton's kernels are interpreted, which is slow, or left out: then their wrappers run the references. All is done at
once, in the order in which it is asked for; where streams allow another order, that is an error (pretend_streams.py).
"""

from __future__ import annotations

import contextlib
import importlib
import inspect
import pkgutil
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from pretend_streams import Clock
from pretend_tensors import PretendMode, PretendTensor, held
from torch import Tensor
from torch.overrides import _get_current_function_mode_stack
from torch.utils._device import DeviceContext, _device_constructors
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import register_dataclass, tree_map

import vllm.ops.triton as triton_kernels
from vllm.ops.quantized_tensor import QuantizedTensor
from vllm.v1.worker.gpu.replay import piecewise_graphs

# So that its tensors are found.
register_dataclass(QuantizedTensor)

MEMORY_BYTES = 4 * 2**30
_PROPERTIES = {
    "name": "pretended",
    "major": 9,
    "minor": 0,
    "multi_processor_count": 4,
    "total_memory": MEMORY_BYTES,
    "L2_cache_size": 2**20,
}
SIZES = (16, 48)
"""Numbers of tokens of steps with prompts that are captured."""


class _Event:
    def __init__(self, mode: PretendMode) -> None:
        self._mode = mode
        self._clock: Clock = {}

    def record(self, stream: _Stream | None = None) -> None:
        self._clock = self._mode.streams.reached()

    def synchronize(self) -> None:
        self._mode.waits("an event's synchronize", self._clock)

    def query(self) -> bool:
        self._mode.streams.host_waits(self._clock)
        return True

    def elapsed_time(self, end: _Event) -> float:
        return 1.0


class _Stream:
    def __init__(self, mode: PretendMode, number: int) -> None:
        self._mode, self.number = mode, number

    def wait_stream(self, other: _Stream) -> None:
        self._mode.streams.wait(self.number, other.number)

    def record_event(self) -> _Event:
        event = _Event(self._mode)
        with _on(self._mode, self):
            event.record()
        return event


@contextlib.contextmanager
def _on(mode: PretendMode, stream: _Stream) -> Iterator[None]:
    before, mode.streams.current = mode.streams.current, stream.number
    try:
        yield
    finally:
        mode.streams.current = before


def _graph_class(mode: PretendMode) -> type:
    class Graph:
        """Runs what was recorded once more, into the tensors that the recording made."""

        def capture_begin(self, pool: Any = None, capture_error_mode: str = "global") -> None:
            assert mode.recording is None
            mode.recording, mode.made, mode.recorded_uses = [], [], (set(), set())

        def capture_end(self) -> None:
            assert mode.recording is not None
            self._recording, mode.recording = mode.recording, None
            self._uses = mode.recorded_uses
            for tensor in mode.made:
                if tensor.numel() and 0 not in tensor.stride():
                    tensor.fill_(-3)  # a recording is not a run

        @torch.inference_mode()
        def replay(self) -> None:
            mode.streams.use(*self._uses)
            with _disable_current_modes():
                for run in self._recording:
                    run()

    return Graph


@contextlib.contextmanager
def _capturing(graph: Any) -> Iterator[None]:
    graph.capture_begin()
    try:
        yield
    finally:
        graph.capture_end()


class _Generator(torch.Generator):
    """The CPU's generator, for the device."""

    def __new__(cls, device: Any = "cpu") -> _Generator:
        return super().__new__(cls, "cpu")

    def __init__(self, device: Any = "cpu") -> None:
        self._device = torch.device(device)

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        return self._device


@contextlib.contextmanager
def pretending(interpreted: bool = False) -> Iterator[None]:
    """torch.cuda has one device, on which tensors can be made.

    Args:
        interpreted: whether Triton's kernels are run, by its interpreter.
    """
    # Torch lists what makes tensors for torch.device's contexts at its first use: the functions themselves, not what
    # stands for them here.
    _device_constructors()
    mode = PretendMode()

    def set_sync_debug_mode(name: str) -> None:
        mode.may_wait = name != "error"

    def synchronize(device: Any = None) -> None:
        mode.waits("synchronize")
        mode.streams.host_waits()

    fakes: dict[str, Any] = {
        "is_available": lambda: True,
        "is_initialized": lambda: True,
        "_lazy_init": lambda: None,
        "device_count": lambda: 1,
        "current_device": lambda: 0,
        "set_device": lambda device: None,
        "get_device_capability": lambda device=None: (9, 0),
        "get_device_name": lambda device=None: "pretended",
        "get_device_properties": lambda device=None: SimpleNamespace(**_PROPERTIES),
        "get_arch_list": lambda: ["sm_90"],
        "mem_get_info": lambda device=None: (MEMORY_BYTES, MEMORY_BYTES),
        "memory_reserved": lambda device=None: 0,
        "memory_allocated": lambda device=None: 0,
        "max_memory_allocated": lambda device=None: 0,
        "max_memory_reserved": lambda device=None: 0,
        "reset_peak_memory_stats": lambda device=None: None,
        "empty_cache": lambda: None,
        "synchronize": synchronize,
        "is_current_stream_capturing": lambda: mode.recording is not None,
        "set_sync_debug_mode": set_sync_debug_mode,
        "graph_pool_handle": lambda: (0, 1),
        "current_stream": lambda device=None: _Stream(mode, mode.streams.current),
        "stream": lambda stream: _on(mode, stream),
        "graph": _capturing,
        "Stream": lambda device=None: _Stream(mode, mode.streams.new()),
        "Event": lambda enable_timing=False: _Event(mode),
        "CUDAGraph": _graph_class(mode),
        "_sleep": lambda cycles: None,
    }
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.version, "cuda", "13.0")
        # Capturing takes as long as running.
        patch.setattr(piecewise_graphs, "_SIZES", SIZES)
        patch.setattr(torch, "tensor", _tensor_maker(mode, torch.tensor))
        patch.setattr(torch, "Generator", _Generator)
        for name, fake in fakes.items():
            patch.setattr(torch.cuda, name, fake)
        if interpreted:
            _interpret(patch, mode)
        else:
            for operation, kernels, name in _wrappers():
                _leave_out(patch, mode, operation, kernels, name)
        patch.setattr(PretendTensor, "mode", mode, raising=False)
        with mode:
            yield
            mode.streams.finish()


def _interpret(patch: pytest.MonkeyPatch, mode: PretendMode) -> None:
    from triton.runtime.interpreter import InterpretedFunction

    run = InterpretedFunction.run

    def run_there(self: Any, *args: Any, **kwargs: Any) -> None:
        own, named = tree_map(held, args), tree_map(held, kwargs)

        def launch() -> None:
            with _disable_current_modes():
                run(self, *own, **named)

        launch()
        mode.record(launch)

    patch.setattr(InterpretedFunction, "run", run_there)


def _tensor_maker(mode: PretendMode, make: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """torch.tensor, which a torch that is built for the CPU alone refuses before any mode could see it."""

    def tensor(data: Any, *, device: Any = None, **kwargs: Any) -> Tensor:
        contexts = [each for each in _get_current_function_mode_stack() if isinstance(each, DeviceContext)]
        where = torch.device(device) if device is not None else contexts[-1].device if contexts else None
        with torch.device("cpu"):
            made = make(data, **kwargs)
        if where is None or where.type != "cuda":
            return made
        if made.numel():
            mode.waits(f"torch.tensor of {tuple(made.shape)}")
        return PretendTensor(made)

    return tensor


def _wrappers() -> Iterator[tuple[Callable[..., Any], ModuleType, str]]:
    """Each operation that has kernels, the module with their wrapper, and the name of both."""
    for info in pkgutil.iter_modules(triton_kernels.__path__):
        if find_spec(f"vllm.ops.{info.name}"):
            operations = importlib.import_module(f"vllm.ops.{info.name}")
            kernels = importlib.import_module(f"{triton_kernels.__name__}.{info.name}")
            for name, function in list(vars(kernels).items()):
                is_own = inspect.isfunction(function) and function.__module__ == kernels.__name__
                if is_own and not name.startswith("_") and hasattr(operations, name):
                    yield getattr(operations, name), kernels, name


def _leave_out(
    patch: pytest.MonkeyPatch, mode: PretendMode, operation: Callable[..., Any], kernels: ModuleType, name: str
) -> None:
    """Let a kernel's wrapper compute with the operation's reference."""
    parameters = list(inspect.signature(operation).parameters.values())
    by_name = [each.name for each in parameters if each.kind == each.KEYWORD_ONLY]

    def launch(*args: Any, **named: Any) -> Any:
        few = len(parameters) - len(by_name)
        return mode.launch(operation, args[:few], dict(zip(by_name, args[few:], strict=False)) | named)

    patch.setattr(kernels, name, launch)
