"""Servers that the tests share; what needs another one has a `folder` or `server` of its own."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from asgi import AppThread, make_engine
from live_server import LiveServer
from served import API_KEY, MODEL
from tiny_llm import make_tiny_model

# The tests' own process computes, too: on a busy core, threads wait long for one another.
_ENV = {"OMP_NUM_THREADS": "1"}


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model."""
    return make_tiny_model(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="session")
def shared_server(folder: Path) -> Iterator[AppThread]:
    """The application over the tiny model, with any number of ids a request."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OMP_NUM_THREADS", "1")
        engine = make_engine(folder, max_logprob_token_ids=-1)
    with AppThread(engine, access_log=False) as app:
        yield app


@pytest.fixture(scope="module")
def server(shared_server: AppThread, request: pytest.FixtureRequest) -> Iterator[AppThread]:
    """The shared one, with the chat template of the test's module, if it has a CHAT_TEMPLATE."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shared_server.state, "chat_template", getattr(request.module, "CHAT_TEMPLATE", None))
        yield shared_server


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
