"""Work on weights, side by side: its many small operations gain little from PyTorch's threads, and on a busy
machine each of them waits for all of these."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TypeVar

import torch

T = TypeVar("T")

# Each holds a weight in two forms meanwhile.
_MOST = 4
# Set when native work begins.
_begun: ContextVar[threading.Event | None] = ContextVar("begun", default=None)
_helpers: ContextVar[_Helpers | None] = ContextVar("helpers", default=None)


def side_by_side(calls: Iterable[Callable[[], T]]) -> Iterator[T]:
    """The results of calls, in order, made in threads that share PyTorch's threads among them, and a few ahead. Until
    all are taken, the caller has such a share, too."""
    total = torch.get_num_threads()
    count = min(_MOST, total)
    pending: deque[Future[T]] = deque()
    torch.set_num_threads(total // count)
    try:
        with ThreadPoolExecutor(count, "loading", torch.set_num_threads, (total // count,)) as pool:
            for call in calls:
                pending.append(pool.submit(_infer, call))
                if len(pending) == 2 * count:
                    yield pending.popleft().result()
            while pending:
                yield pending.popleft().result()
    finally:
        torch.set_num_threads(total)


@contextmanager
def one_thread() -> Iterator[None]:
    """PyTorch's operations in the block run in the caller's thread alone: threads that wait for small ones would keep
    the cores from others' work."""
    total = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(total)


class _Helpers:
    """Threads that make calls a few ahead of a caller, which waits where there are many."""

    def __init__(self, pool: ThreadPoolExecutor, most: int) -> None:
        self._pool, self._most = pool, most
        self._pending: deque[Future[None]] = deque()

    def submit(self, call: Callable[[], None]) -> None:
        self._pending.append(self._pool.submit(_infer, call))
        if len(self._pending) > self._most:
            self._pending.popleft().result()

    def finish(self) -> None:
        while self._pending:
            self._pending.popleft().result()


@contextmanager
def helped() -> Iterator[None]:
    """Work that the block hands over is done in threads beside the caller's, which share PyTorch's threads with it, and
    when the block has ended. An error of it is raised by a later `hand_over` or by the block's end."""
    total = torch.get_num_threads()
    count = min(_MOST, total)
    torch.set_num_threads(total // count)
    try:
        with ThreadPoolExecutor(count, "loading", torch.set_num_threads, (total // count,)) as pool:
            # Calls that wait keep their memory, too.
            helpers = _Helpers(pool, count)
            token = _helpers.set(helpers)
            try:
                yield
                helpers.finish()
            finally:
                _helpers.reset(token)
    finally:
        torch.set_num_threads(total)


def hand_over(call: Callable[[], None]) -> None:
    """Make a call, now or, within `helped`, in a thread."""
    if (helpers := _helpers.get()) is not None:
        helpers.submit(call)
    else:
        call()


def await_handed_over() -> None:
    """Wait until all calls have been made that were handed over; raises an error of theirs."""
    if (helpers := _helpers.get()) is not None:
        helpers.finish()


@torch.inference_mode()
def _infer(call: Callable[[], T]) -> T:
    return call()


def in_thread(call: Callable[[], T]) -> Future[T]:
    """The result of a call in a thread of its own."""
    pool = ThreadPoolExecutor(1, "loading")
    try:
        return pool.submit(call)
    finally:
        pool.shutdown(wait=False)


@contextmanager
def meanwhile(call: Callable[[], T]) -> Iterator[Future[T]]:
    """Make a call that holds Python's lock for long, as the loading of a large tokenizer does, while the block runs: in
    a thread that begins with the block's first `native_work_begins`, and at the latest when the block ends, unless that
    fails. The call has ended when the context has; its error is raised by the future's `result`."""
    begun, given_up = threading.Event(), threading.Event()

    def begin() -> T:
        begun.wait()
        if given_up.is_set():
            raise CancelledError
        return call()

    with ThreadPoolExecutor(1, "meanwhile") as pool:
        token = _begun.set(begun)
        try:
            yield pool.submit(begin)
        except BaseException:
            given_up.set()
            raise
        finally:
            _begun.reset(token)
            begun.set()


def native_work_begins() -> None:
    """Let the call of `meanwhile` begin: what follows takes long, and does not hold Python's lock."""
    if (begun := _begun.get()) is not None:
        begun.set()
