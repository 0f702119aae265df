"""Which ranks share the model that is being built."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from vllm.distributed.communicator import ALONE, Communicator

_tp_group: ContextVar[Communicator] = ContextVar("tp_group", default=ALONE)


def get_tp_group() -> Communicator:
    """The tensor-parallel group of the model being built; a group of one rank outside `tensor_parallel`. Layers keep
    the group of their construction, as one process may hold several engines."""
    return _tp_group.get()


def set_tp_group(group: Communicator) -> None:
    """Build models for `group` from now on, in this context."""
    _tp_group.set(group)


@contextmanager
def tensor_parallel(group: Communicator) -> Iterator[None]:
    """Build a model for `group` within."""
    token = _tp_group.set(group)
    try:
        yield
    finally:
        _tp_group.reset(token)
