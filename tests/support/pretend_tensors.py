"""Tensors of a device that computes on the CPU but keeps apart from it, and what becomes of operations on them.

They hold CPU tensors and say that they are on "cuda". An operation that mixes them with the CPU's is an error, as on a
GPU. So is, where `may_wait` is false, and always while a graph is captured, what would make the host wait: bringing
anything to the host, an operation whose result's shape depends on values, a copy from or to memory that is not pinned.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import fields, is_dataclass, replace
from typing import Any

import torch
from pretend_streams import Clock, Streams, key_of
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map

from vllm.ops._dispatch import force

DEVICE = torch.device("cuda", 0)

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
_INDEXING = {_aten.index, _aten.index_put_, _aten.index_put, _aten._index_put_impl_}
_COPYING = {_aten._to_copy, _aten.copy_}
# Not taken apart: some parts would be made where the tensors say that they are.
_WHOLE = {_aten.where, _aten.scaled_dot_product_attention}


def _mm_to(x: Tensor, y: Tensor, dtype: torch.dtype) -> Tensor:
    return x.to(dtype) @ y.to(dtype)


# Operators that CUDA computes and the CPU does not.
_OWN_KERNELS: dict[Any, Callable[..., Any]] = {_aten.mm.dtype: _mm_to}


class WaitsForDevice(AssertionError):
    """The host would wait."""


class MixesDevices(AssertionError):
    """An operation that CUDA refuses."""


class PretendTensor(Tensor):
    """A tensor of the pretended device; `held` is the CPU tensor."""

    held: Tensor
    mode: PretendMode

    @staticmethod
    def __new__(cls, held: Tensor) -> PretendTensor:
        # A view of a tensor that inference mode did not make must not be its own.
        with torch.inference_mode(False):
            return Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
                cls,
                held.shape,
                strides=held.stride(),
                storage_offset=held.storage_offset(),
                dtype=held.dtype,
                # A torch that is built for the CPU alone refuses to index tensors on "cuda".
                device="meta",
            )

    def __init__(self, held: Tensor) -> None:
        self.held = held
        self.mode.streams.hold(held, self, of_graph=self.mode.recording is not None)

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        return DEVICE

    @property
    def is_cuda(self) -> bool:  # type: ignore[override]
        return True

    @property
    def is_meta(self) -> bool:  # type: ignore[override]
        return False

    def __setitem__(self, index: Any, value: Any) -> None:
        if not isinstance(value, Tensor):
            # Otherwise it would be made where the tensor says that it is.
            with _disable_current_modes():
                value = PretendTensor(torch.full((), value, dtype=self.dtype, device="cpu"))
        super().__setitem__(index, value)

    def data_ptr(self) -> int:
        return self.held.data_ptr()

    def record_stream(self, stream: Any) -> None:  # type: ignore[override]
        self.mode.streams.record(self.held, stream.number)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise AssertionError(f"{func} on a pretended device outside of `pretending`")


class PretendMode(TorchDispatchMode):
    """Runs operations on the pretended device."""

    def __init__(self) -> None:
        super().__init__()
        self.may_wait = True
        self.recording: list[Callable[[], None]] | None = None
        self.made: list[Tensor] = []  # while recording: what the graph computes
        self.recorded_uses: tuple[set[int], set[int]] = set(), set()  # while recording: storages read and written
        self.streams = Streams()
        self._pinned: dict[int, Tensor] = {}  # by address, kept so that nothing else comes to lie there

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, packet = dict(kwargs or {}), func.overloadpacket
        if packet is _aten.is_pinned:
            return self._is_pinned(args[0])
        if packet in (_aten.pin_memory, _aten._pin_memory):
            return self._pin(args[0].clone())
        if packet is _aten.to:
            return self._to(func, args, kwargs)
        # Inference mode hands over operations that are made of others.
        is_composite = torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), "CompositeImplicitAutograd")
        if is_composite and packet not in _WHOLE:
            with self:
                return func.decompose(*args, **kwargs)
        if kwargs.pop("pin_memory", False):
            return self._pin(func(*args, **kwargs))
        operands = [each for each in tree_leaves((args, kwargs)) if isinstance(each, Tensor)]
        is_asked = kwargs.get("device") is not None
        to_device = is_asked and torch.device(kwargs["device"]).type == "cuda"
        if not to_device and not any(isinstance(each, PretendTensor) for each in operands):
            return func(*args, **kwargs)
        self._check(func, args, kwargs, operands)
        to_host = packet is _aten._to_copy and is_asked and not to_device
        return self._compute(func, args, kwargs, to_host or packet is _aten._local_scalar_dense)

    def _to(self, func: Any, args: Any, kwargs: Any) -> Tensor:
        names = [each.name for each in func._schema.arguments]
        given = {**dict(zip(names, args, strict=False)), **kwargs}
        source, like = given["self"], given.get("other")
        dtype = given.get("dtype") or (source.dtype if like is None else like.dtype)
        device = torch.device(given.get("device") or (source.device if like is None else like.device))
        if (source.dtype, source.device.type) == (dtype, device.type) and not given.get("copy"):
            return source
        with self:
            non_blocking = given.get("non_blocking") or False
            return _aten._to_copy(source, dtype=dtype, device=device, non_blocking=non_blocking)

    def _compute(self, func: Any, args: Any, kwargs: Any, to_host: bool) -> Any:
        asked = {name: torch.device("cpu") if name == "device" else value for name, value in kwargs.items()}
        held_args, held_kwargs = tree_map(held, args), tree_map(held, asked)
        returns = func._schema.returns
        is_view = any(each.alias_info is not None and not each.alias_info.is_write for each in returns)

        kernel = _OWN_KERNELS.get(func, func)

        def run() -> Any:
            return kernel(*held_args, **held_kwargs)

        host = self._pinned_operand(func, args, kwargs)
        if host is not None and host is args[0] and func._schema.is_mutable:
            self.streams.copy_to_host(host, held_args[1], self._use(args[1], ()))
            return host
        if host is not None:
            self.streams.deliver(host)
        result = run()
        if func._schema.is_mutable:
            self.record(run)
            # The tensors that it writes, in the order of the arguments.
            written = [
                args[index] if index < len(args) else kwargs.get(each.name)
                for index, each in enumerate(func._schema.arguments)
                if each.is_out or (each.alias_info is not None and each.alias_info.is_write)
            ]
            given = written[0] if len(returns) == 1 else tuple(written) if returns else None
        elif to_host:
            given, written = result, []
        else:
            if is_view:
                return tree_map(there, result)
            self._record_new(run, result)
            given = tree_map(there, result)
            written = tree_leaves(given)
        done = self._use((args, kwargs), written)
        if host is not None:
            self.streams.copy_from_host(host, done)
        return given

    def _pinned_operand(self, func: Any, args: Any, kwargs: Any) -> Tensor | None:
        """Host memory from or to which a copy goes that nobody waits for."""
        if func.overloadpacket not in _COPYING:
            return None
        tensors = [each for each in tree_leaves((args, kwargs)) if isinstance(each, Tensor)]
        return next((each for each in tensors if not isinstance(each, PretendTensor) and self._is_pinned(each)), None)

    def _use(self, read: Any, written: Any) -> Clock:
        """Tell the streams of an operation, or the graph, if one is captured."""
        reads, writes = (
            {key_of(each.held) for each in tree_leaves(all_of) if isinstance(each, PretendTensor)}
            for all_of in (read, written)
        )
        if self.recording is None:
            return self.streams.use(reads - writes, writes)
        self.recorded_uses[0].update(reads)
        self.recorded_uses[1].update(writes)
        return {}

    def launch(self, compute: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Run a kernel's wrapper on held tensors."""
        for each in tree_leaves((args, kwargs)):
            if isinstance(each, Tensor) and not isinstance(each, PretendTensor):
                raise MixesDevices(f"a kernel is given {tuple(each.shape)} {each.dtype} on the CPU")
        held_args, held_kwargs = _with_parts(args), _with_parts(kwargs)
        by_held = {id(held(each)): each for each in args if isinstance(each, Tensor)}

        def run() -> Any:
            with _disable_current_modes(), force("reference"):
                return compute(*held_args, **held_kwargs)

        result = run()
        self._record_new(run, result, set(by_held))
        given = tree_map(lambda each: by_held[id(each)] if id(each) in by_held else there(each), result)
        # Which of its arguments it writes is not known.
        self._use((), (args, kwargs, given))
        return given

    def record(self, run: Callable[[], Any]) -> None:
        """While a graph is captured, let it do this, too."""
        if self.recording is not None:
            self.recording.append(run)

    def _record_new(self, run: Callable[[], Any], result: Any, given: Collection[int] = ()) -> None:
        if self.recording is None:
            return
        made = [each for each in tree_leaves(result) if isinstance(each, Tensor) and id(each) not in given]
        self.made += made

        def again() -> None:
            new = [each for each in tree_leaves(run()) if isinstance(each, Tensor) and id(each) not in given]
            for own, value in zip(made, new, strict=True):
                own.copy_(value)

        self.recording.append(again)

    def _is_pinned(self, tensor: Tensor) -> bool:
        return tensor.untyped_storage().data_ptr() in self._pinned

    def _pin(self, tensor: Tensor) -> Tensor:
        self._pinned[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    def _check(self, func: Any, args: Any, kwargs: Any, operands: list[Tensor]) -> None:
        packet = func.overloadpacket
        if packet in _COPYING:
            self._check_copy(func, args, kwargs, operands)
            return
        if packet in _WAITING:
            self.waits(str(func))
        if packet in _INDEXING and any(
            each is not None and each.dtype in (torch.bool, torch.uint8) for each in args[1]
        ):
            self.waits(f"{func} by a mask, whose places are counted first")
        for each in operands:
            if not isinstance(each, PretendTensor) and each.dim():
                raise MixesDevices(f"{func} reads {tuple(each.shape)} {each.dtype} on the CPU")

    def _check_copy(self, func: Any, args: Any, kwargs: Any, operands: list[Tensor]) -> None:
        host = next((each for each in operands if not isinstance(each, PretendTensor)), None)
        if host is None:
            if torch.device(kwargs.get("device") or DEVICE).type == "cpu":
                self.waits(f"{func} to the host")
            return
        non_blocking = kwargs.get("non_blocking") or (func.overloadpacket is _aten.copy_ and len(args) > 2 and args[2])
        if host.dim() and not (non_blocking and self._is_pinned(host)):
            self.waits(f"{func}: {tuple(host.shape)} {host.dtype} in pageable memory")

    def waits(self, what: str, *clocks: Clock) -> None:
        """The host waits, for the current stream if nothing else is said."""
        if not self.may_wait or self.recording is not None:
            raise WaitsForDevice(what)
        self.streams.host_waits(*clocks or (self.streams.reached(),))


def held(tensor: Any) -> Any:
    """The CPU tensor that a pretended one holds; anything else as it is."""
    return tensor.held if isinstance(tensor, PretendTensor) else tensor


def _is_parts(value: Any) -> bool:
    return is_dataclass(value) and not isinstance(value, type)


def _with_parts(value: Any) -> Any:
    """As `held`, also of tensors in data classes."""

    def of(each: Any) -> Any:
        if not _is_parts(each):
            return held(each)
        return replace(each, **{item.name: _with_parts(getattr(each, item.name)) for item in fields(each) if item.init})

    return tree_map(of, value, is_leaf=_is_parts)


def there(tensor: Any) -> Any:
    return PretendTensor(tensor) if isinstance(tensor, Tensor) else tensor
