"""Faults of a rank, in the middle of a step. Importable by the workers, whom it is sent to."""

from __future__ import annotations

import os
import signal
import time
from typing import Any


def ending_faults(kind_of_rank: str = "") -> list[tuple[int, str, str]]:
    """Faults that end an engine: rank, kind, and what the error says, of a rank as errors call it."""
    raised = r"rank 1 failed:\nTraceback .*rank_faults.py.*ArithmeticError: a layer's fault"
    return [
        (1, "killed", "rank 1 has gone: its process ended with signal 9"),
        (1, "raises", f"(?s)^{kind_of_rank}{raised}"),
        (1, "stopped", "rank 1 hangs: it gives no sign of life"),
        (1, "hangs", r"(?s)the step hangs: .*rank 1 is at:.*rank_faults.py"),
        (0, "raises", "rank 0 failed: ArithmeticError: a layer's fault"),
    ]


def fail_in_step(worker: Any, rank: int, kind: str) -> int:
    """Let the worker of this rank fail between two collectives of its next step; the process's id."""
    if worker.rank == rank:
        decoder = worker.model_runner.model.model
        layer = decoder.layers[decoder.own_layers[-1]]
        layer.forward = {"killed": _kill, "stopped": _stop, "raises": _raise, "hangs": _hang}[kind]
    return os.getpid()


def raise_on(worker: Any, rank: int) -> int:
    """A call that fails on one rank."""
    if worker.rank == rank:
        raise ValueError(f"not on rank {rank}")
    return int(worker.rank)


def tokens_seen(worker: Any) -> int:
    """How many tokens the worker's requests have, free slots included."""
    return int(worker.model_runner.states.num_computed_tokens.sum())


def layers_here(worker: Any) -> list[int]:
    """The layers that the worker has."""
    return list(worker.model_runner.model.model.own_layers)


def _kill(*_: Any) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _stop(*_: Any) -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


def _raise(*_: Any) -> None:
    raise ArithmeticError("a layer's fault")


def _hang(*_: Any) -> None:
    time.sleep(600)
