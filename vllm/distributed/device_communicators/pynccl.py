"""Upstream's binding of NCCL, which is not there: torch.distributed brings NCCL."""

from __future__ import annotations

from typing import Any


class PyNcclCommunicator:
    """A class to import and to ask isinstance of.

    Raises:
        NotImplementedError: one is made.
    """

    def __init__(self, group: Any, device: Any, library_path: str | None = None) -> None:
        raise NotImplementedError(
            "PyNcclCommunicator: weights are not received over NCCL by upstream's binding; load them where the engine "
            "is (collective_rpc), or broadcast them with torch.distributed and call load_weights"
        )
