"""What workers have in common: here there is one class of them."""

from __future__ import annotations

from typing import ClassVar

from vllm.utils.unserved import Unserved
from vllm.v1.worker.worker import Worker as WorkerBase


class WorkerWrapperBase(Unserved):
    """Makes a worker when it is told which."""

    instead: ClassVar[str] = "the executor makes its workers; worker_extension_cls adds methods to them"


__all__ = ["WorkerBase", "WorkerWrapperBase"]
