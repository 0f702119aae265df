"""The order of copies on two streams, which on a GPU run as late, or as early, as their waits for each other let them.
Streams that are made up queue every operation, and run them in the worst orders."""

from __future__ import annotations

import contextlib

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from vllm.ops._dispatch import cpu_ops
from vllm.v1.features.swap import runner as kv_swap
from vllm.v1.features.swap.runner import KVSwap
from vllm.v1.worker.gpu.states import BlockCopies

aten = torch.ops.aten


class LateStream:
    """A queue of operations, and of waits for the first so many of another queue."""

    def __init__(self) -> None:
        self.queue: list = []
        self.num_done = 0

    def wait_stream(self, other: LateStream) -> None:
        self.queue.append((other, len(other.queue)))

    def advance(self) -> bool:
        """Do the next operation, if there is one and it need not wait."""
        if self.num_done == len(self.queue):
            return False
        item = self.queue[self.num_done]
        if isinstance(item, tuple) and item[0].num_done < item[1]:
            return False
        if not isinstance(item, tuple):
            item()
        self.num_done += 1
        return True


class Queued(TorchDispatchMode):
    """Operations on a tensor's elements are queued on the current stream; views are made at once."""

    def __init__(self) -> None:
        super().__init__()
        self.stream = self.main = LateStream()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func is aten.index_select.default:
            source, _, index = args
            result = source.new_empty((len(index), *source.shape[1:]))
            self.stream.queue.append(lambda: torch.index_select(*args, out=result))
            return result
        if func in (aten.cat.out, aten.copy_.default, aten.index_copy_.default, aten.fill_.Scalar):
            self.stream.queue.append(lambda: func(*args, **kwargs))
            return kwargs.get("out", args[0])
        if func is torch.ops.vllm_cpu.copy_blocks_.default:
            self.stream.queue.append(lambda: func(*args, **kwargs))
            return None
        views = (aten.slice.Tensor, aten.select.int, aten.view.default, aten.view.dtype, aten.split_with_sizes.default)
        others = (aten.new_empty.default, aten.lift_fresh.default, aten.detach.default)
        assert func in (*views, *others), func
        return func(*args, **kwargs)

    @contextlib.contextmanager
    def on(self, stream: LateStream):
        before, self.stream = self.stream, stream
        yield
        self.stream = before


@pytest.mark.parametrize("blocks_a_turn", [1, 2, 8])
@pytest.mark.parametrize("copies_first", [False, True])
def test_any_order_that_the_streams_allow_gives_the_same(monkeypatch, blocks_a_turn, copies_first):
    cpu_ops()  # loading the kernels calls an operation of theirs
    shape = (6, 3)
    caches = [
        tuple(torch.arange(18.0).reshape(shape) + 100 * i for i in (2 * layer, 2 * layer + 1)) for layer in (0, 1)
    ]
    tensors = [tensor for pair in caches for tensor in pair]
    monkeypatch.setattr(kv_swap, "STAGING_BYTES", blocks_a_turn * 4 * 3 * 4)
    swap = KVSwap(BlockCopies(caches), 8)
    mode, copy_stream = Queued(), LateStream()
    monkeypatch.setattr(swap, "_stream", copy_stream)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: mode.stream)
    monkeypatch.setattr(torch.cuda, "stream", mode.on)
    # Steps that begin while the ones before them run: each overwrites what it has copied out, and what comes back has
    # left in the same step, or one before.
    steps = [([(0, 3), (1, 2), (2, 7)], []), ([(3, 0)], [(3, 0), (7, 1), (0, 4)]), ([(4, 3), (5, 1)], [(2, 5), (3, 3)])]
    expected, host = [tensor.clone() for tensor in tensors], [torch.zeros(8, 3) for _ in tensors]
    for number, (swap_out, swap_in) in enumerate(steps):
        for own, copy in zip(expected, host, strict=True):
            for block, host_block in swap_out:
                copy[host_block] = own[block]
            for host_block, block in swap_in:
                own[block] = copy[host_block]
            own[number] = -1.0 - number
        with mode:
            swap.swap_out(swap_out)
            swap.swap_in(swap_in)
            for tensor in tensors:
                tensor[number].fill_(-1.0 - number)
    order = [copy_stream, mode.main] if copies_first else [mode.main, copy_stream]
    while any(stream.advance() for stream in order):
        pass
    assert all(stream.num_done == len(stream.queue) > 8 for stream in order)
    for own, tensor in zip(expected, tensors, strict=True):
        assert torch.equal(own, tensor)
