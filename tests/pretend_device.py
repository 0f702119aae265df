"""A device that computes on the CPU but keeps apart from it, as CUDA does: tests of code for devices, without one.

Tensors of the pretended device hold CPU tensors, and say that they are on "meta", which PyTorch itself never computes
with. What would make the host wait for a CUDA device is an error here: bringing anything to the host, an operation
whose result's shape depends on values, a copy from memory that is not pinned.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

DEVICE = torch.device("meta")

_aten = torch.ops.aten
_WAITING = {
    _aten._local_scalar_dense,
    _aten.nonzero,
    _aten.masked_select,
    _aten._unique2,
    _aten.unique_dim,
    _aten.unique_consecutive,
    _aten.repeat_interleave,
    _aten.bincount,
    _aten.equal,
    _aten.is_nonzero,
}


class WaitsForDevice(AssertionError):
    """The host would wait."""


class PretendTensor(Tensor):
    """Of the pretended device; `held` is the CPU tensor."""

    held: Tensor

    @staticmethod
    def __new__(cls, held: Tensor) -> PretendTensor:
        return Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            cls,
            held.shape,
            strides=held.stride(),
            storage_offset=held.storage_offset(),
            dtype=held.dtype,
            device=DEVICE,
        )

    def __init__(self, held: Tensor) -> None:
        self.held = held

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        _check(func, args, kwargs)
        if kwargs.get("device") == DEVICE:
            kwargs = {**kwargs, "device": "cpu"}
        result = func(*tree_map(held, args), **tree_map(held, kwargs))
        if func._schema.is_mutable and args and isinstance(args[0], cls):
            return args[0]  # in place
        return tree_map(_there, result)


class _Mode(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self._pinned: list[Tensor] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if any(isinstance(each, PretendTensor) for each in tree_leaves((args, kwargs))):
            if func.overloadpacket is _aten.copy_ and not isinstance(args[1], PretendTensor):
                self._check_upload(args[1], args[2] if len(args) > 2 else kwargs.get("non_blocking", False))
                args[0].held.copy_(args[1])
                return args[0]
            return func(*args, **kwargs)
        if func.overloadpacket is _aten.is_pinned:
            return self._is_pinned(args[0])
        if func.overloadpacket is _aten._pin_memory:
            self._pinned.append(args[0].clone())
            return self._pinned[-1]
        if kwargs.get("device") != DEVICE:
            return func(*args, **kwargs)
        if func.overloadpacket is _aten._to_copy:
            self._check_upload(args[0], kwargs.get("non_blocking", False))
        return PretendTensor(func(*args, **{**kwargs, "device": "cpu"}))

    def _is_pinned(self, tensor: Tensor) -> bool:
        storage = tensor.untyped_storage().data_ptr()
        return any(pinned.untyped_storage().data_ptr() == storage for pinned in self._pinned)

    def _check_upload(self, source: Tensor, non_blocking: bool) -> None:
        if source.dim() and not (non_blocking and self._is_pinned(source)):
            raise WaitsForDevice(f"a copy of {tuple(source.shape)} {source.dtype} from the host's pageable memory")


def held(tensor: Any) -> Any:
    """The CPU tensor that a pretended one holds; anything else as it is."""
    return tensor.held if isinstance(tensor, PretendTensor) else tensor


def _there(tensor: Any) -> Any:
    return PretendTensor(tensor) if isinstance(tensor, Tensor) else tensor


def _check(func: Any, args: Any, kwargs: Any) -> None:
    packet, leaves = func.overloadpacket, tree_leaves((args, kwargs))
    if packet in _WAITING:
        raise WaitsForDevice(str(func))
    if packet in (_aten._to_copy, _aten.copy_):
        target = kwargs.get("device", DEVICE) if packet is _aten._to_copy else args[0].device
        if torch.device(target) != DEVICE:
            raise WaitsForDevice(f"{func} to the host")
        return
    if packet in (_aten.index, _aten.index_put_, _aten.index_put, _aten._index_put_impl_):
        masks = [each for each in args[1] if each is not None and each.dtype in (torch.bool, torch.uint8)]
        if masks:
            raise WaitsForDevice(f"{func} by a mask, whose places are counted first")
    for each in leaves:
        if isinstance(each, Tensor) and not isinstance(each, PretendTensor) and each.dim():
            raise WaitsForDevice(f"{func} reads {tuple(each.shape)} {each.dtype} on the host")


@contextmanager
def pretending() -> Iterator[None]:
    """Tensors can be made on DEVICE, and interpreted Triton kernels run on them."""
    from triton.runtime.interpreter import InterpretedFunction

    run = InterpretedFunction.run

    def run_there(self: Any, *args: Any, **kwargs: Any) -> Any:
        with torch.utils._python_dispatch._disable_current_modes():
            return run(self, *map(held, args), **kwargs)

    InterpretedFunction.run = run_there
    try:
        with _Mode():
            yield
    finally:
        InterpretedFunction.run = run
