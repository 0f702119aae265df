"""Requests that wait for their grammars, which are compiled beside the steps."""

from __future__ import annotations

from collections.abc import Iterable
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from typing import Any

from vllm.config import ModelConfig
from vllm.v1.request import Request
from vllm.v1.structured_output.matcher import grammars_of

# How long a step that has nothing else to do waits for a grammar, in seconds.
_PATIENCE = 0.02


class CompilingRequests:
    """Requests whose grammar this process has not compiled yet. The tokenizer, too, is read for the first of them."""

    def __init__(self, config: ModelConfig) -> None:
        self._config = config
        self._threads: ThreadPoolExecutor | None = None
        self._requests: dict[str, tuple[Request, Future[Any]]] = {}

    def __len__(self) -> int:
        return len(self._requests)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._requests

    def add(self, request: Request) -> bool:
        """Take a request with a grammar; False: its grammar is compiled already."""
        grammar = request.sampling_params.grammar
        assert grammar is not None
        if self._threads is None:
            self._threads = ThreadPoolExecutor(2, "grammars")
        compiled = self._threads.submit(lambda: grammars_of(self._config).start(grammar))
        # One that is kept takes a fraction of a millisecond.
        wait([compiled], timeout=0.001)
        if compiled.done() and compiled.exception() is None:
            return False
        self._requests[request.request_id] = request, compiled
        return True

    def take(self, is_idle: bool) -> list[tuple[Request, str | None]]:
        """Requests whose grammars have been compiled since, in order of their arrival, and why one has not been.
        `is_idle`: wait a moment for the first."""
        if not self._requests:
            return []
        if is_idle:
            wait([compiled for _, compiled in self._requests.values()], _PATIENCE, FIRST_COMPLETED)
        ready = [(request, compiled) for request, compiled in self._requests.values() if compiled.done()]
        for request, _ in ready:
            del self._requests[request.request_id]
        return [(request, None if (error := each.exception()) is None else str(error)) for request, each in ready]

    def drop(self, request_ids: Iterable[str]) -> None:
        """Forget requests; others' ids are ignored."""
        for request_id in request_ids:
            self._requests.pop(request_id, None)
