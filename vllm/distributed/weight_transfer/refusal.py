"""Engines do not receive weights from another process yet."""

from __future__ import annotations

from typing import NoReturn


def refuse_transfer(name: str) -> NoReturn:
    """
    Raises:
        NotImplementedError: always: says what to do instead.
    """
    raise NotImplementedError(
        f"{name}: engines do not receive weights from another process over NCCL; train with the engine in the "
        "trainer's own process, or save the weights over the model's and call collective_rpc('reload_weights')"
    )
