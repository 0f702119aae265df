"""Servers of the tests: `server` is the usual one, `serve` starts others, and processes are LiveServer's."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from asgi import AppThread, Serve, make_engine
from forced_tokens import FORCED
from live_server import LiveServer
from served import API_KEY, MODEL
from tiny_llm import make_tiny_model

# The tests' own process computes, too: on a busy core, threads wait long for one another.
_ENV = {"OMP_NUM_THREADS": "1"}
SHARED: tuple[dict[str, Any], ...] = ({"max_logprob_token_ids": -1}, FORCED)
"""Arguments of the engines that many files ask for."""


class Servers:
    """Applications over tiny engines, each in a thread of this process. Engines that are asked for with the same
    arguments and no folder are one, until the session ends, if they are among SHARED; others end with the module.
    """

    def __init__(self, factory: pytest.TempPathFactory) -> None:
        self._factory = factory
        self._shared: dict[int, AppThread] = {}
        self._ends_last = ExitStack()

    def start(
        self,
        ends: ExitStack,
        engine: dict[str, Any] | None = None,
        folder: Path | None = None,
        chat_template: str | None = None,
        **args: Any,
    ) -> AppThread:
        """A server that ends with `ends`.

        Args:
            engine: the engine's arguments; by default any number of ids a request.
            folder: its model; by default one of make_tiny_model whose context is as long as the engine's.
            args: ServerArgs.
        """
        fields = SHARED[0] if engine is None else engine
        args = {"access_log": False, **args}
        if folder is None and fields in SHARED:
            beside = self._shared.get(SHARED.index(fields))
            if beside is None:
                beside = self._shared[SHARED.index(fields)] = self._ends_last.enter_context(self._own(fields, folder))
            app = ends.enter_context(AppThread(beside.engine, beside, **args))
        else:
            app = ends.enter_context(self._own(fields, folder, **args))
        app.state.chat_template = chat_template
        return app

    def _own(self, fields: dict[str, Any], folder: Path | None, **args: Any) -> AppThread:
        if folder is None:
            length = max(fields.get("max_model_len", 0), 256)
            folder = make_tiny_model(self._factory.mktemp("tiny"), max_position_embeddings=length)
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("OMP_NUM_THREADS", "1")
            engine = make_engine(folder, **fields)
        return AppThread(engine, **args)

    def close(self) -> None:
        """End the shared engines."""
        self._ends_last.close()


@pytest.fixture(scope="session")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Servers]:
    """Starts the servers of `serve`."""
    every = Servers(tmp_path_factory)
    yield every
    every.close()


@pytest.fixture(scope="module")
def serve(servers: Servers) -> Iterator[Serve]:
    """Starts servers that end with the test's module, by the arguments of Servers.start."""
    with ExitStack() as ends:
        yield partial(servers.start, ends)


@pytest.fixture(scope="module")
def server(serve: Serve, request: pytest.FixtureRequest) -> AppThread:
    """The usual one, with the chat template of the test's module, if it has a CHAT_TEMPLATE."""
    return serve(chat_template=getattr(request.module, "CHAT_TEMPLATE", None))


@pytest.fixture(scope="session")
def live_server() -> Iterator[LiveServer]:
    """The embedded model as the `llm` fixture has it, served as MODEL."""
    flags = ("--served-model-name", MODEL, "--max-model-len", "256", "--max-logprobs", "-1")
    with LiveServer(None, *flags, env=_ENV) as server:
        yield server


@pytest.fixture(scope="session")
def guarded_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    """A tiny model behind API_KEY, for short bodies and one sequence at a time."""
    # A context that takes some seconds to fill.
    folder = make_tiny_model(tmp_path_factory.mktemp("guarded"), max_position_embeddings=8192)
    limits = ("--max-num-seqs", "1", "--max-num-queued-reqs", "0", "--max-body-mib", "0.01")
    with LiveServer(folder, "--api-key", API_KEY, *limits, env=_ENV) as server:
        yield server


@pytest.fixture(scope="module")
def engines_of_one_thread() -> Iterator[None]:
    """Engines that the tests start compute in one thread: on a busy core, several wait long for one another."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OMP_NUM_THREADS", "1")
        yield
