"""Requests that wait for their grammars, which are compiled beside the steps."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any

from vllm.config import ModelConfig
from vllm.v1.core.guests import SchedulerGuest
from vllm.v1.request import Request
from vllm.v1.structured_output.matcher import grammars_of

# How long a step that has nothing else to do waits for a grammar, in seconds.
_PATIENCE = 0.02


class GrammarCompiler(SchedulerGuest):
    """Requests whose grammar this process has not compiled yet are not queued before it has. The tokenizer, too, is
    read for the first of them."""

    def __init__(self, config: ModelConfig, scheduler: Any) -> None:
        self._config, self._scheduler = config, scheduler
        self._threads: ThreadPoolExecutor | None = None
        self._requests: dict[str, tuple[Request, Future[Any]]] = {}

    def prepares(self, request: Request) -> bool:
        grammar = request.sampling_params.grammar
        if grammar is None:
            return False
        if self._threads is None:
            self._threads = ThreadPoolExecutor(2, "grammars")
        compiled = self._threads.submit(lambda: grammars_of(self._config).start(grammar))
        # One that is kept takes a fraction of a millisecond.
        wait([compiled], timeout=0.001)
        if compiled.done() and compiled.exception() is None:
            return False
        compiled.add_done_callback(self._scheduler.rest.wake)
        self._requests[request.request_id] = request, compiled
        return True

    def prepared(self, is_idle: bool) -> Sequence[tuple[Request, str | None]]:
        """In order of their arrival."""
        if not self._requests:
            return ()
        if is_idle and not any(compiled.done() for _, compiled in self._requests.values()):
            self._scheduler.rest(_PATIENCE)
        ready = [(request, compiled) for request, compiled in self._requests.values() if compiled.done()]
        for request, _ in ready:
            del self._requests[request.request_id]
        return [(request, None if (error := each.exception()) is None else str(error)) for request, each in ready]

    def ended(self, request: Request) -> None:
        self._requests.pop(request.request_id, None)
