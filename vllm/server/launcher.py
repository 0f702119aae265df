"""The server's process: listening, running the application, shutdown."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import importlib
import logging
import os
import signal
import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterator
from types import FrameType
from typing import TYPE_CHECKING, Any

import uvicorn
import uvloop
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from vllm.config import VllmConfig
from vllm.entrypoints.async_llm import AsyncLLM
from vllm.logger import init_logger, timed
from vllm.server.listening import bind
from vllm.server.server_args import ServerArgs
from vllm.tokenizers.tokenizer import Tokenizer
from vllm.v1.engine.core_process.start import CoreProcessHandle

if TYPE_CHECKING:
    # At run time imported late, while the engine's core starts.
    from fastapi import FastAPI

    from vllm.server.state import ServerState

__all__ = ["bind", "serve", "serve_app", "url_of"]

logger = init_logger(__name__)

EXIT_FAULT = 1
EXIT_SIGNAL = 128
"""Plus the number of the signal that cut requests short."""

# Longer than proxies and clients keep idle connections, so that the server never closes one under a new request.
_KEEP_ALIVE_SECONDS = 75

# Limit from the end of all requests to that of the process.
_END_SECONDS = 6.0

# Limit for answering cancelled requests: clients that do not read take longer.
_ANSWER_SECONDS = 2.0

# `timeout` and `uv run` send a signal twice, to their child and to its process group: it counts once in this time.
_ONE_SIGNAL_SECONDS = 0.25


def serve(
    config: VllmConfig,
    args: ServerArgs,
    chat_template: str | None,
    listener: socket.socket,
    core_process: CoreProcessHandle,
    check_signals: Callable[[], None],
) -> int:
    """Load the model and serve it until a signal or the engine's death. Runs in the main thread only.

    Args:
        chat_template: text of a template in place of the model's own.
        listener: from `bind`.
        core_process: from `start_core`, of the first replica.
        check_signals: raises if a signal came before the server was ready; so does this function.

    Returns:
        The exit code: 0 after a signal, 1 after the engine's death or an unexpected end, 128 + the number of a second
        signal, which cuts requests short.

    Raises:
        EngineDeadError: the engine could not start.
    """
    engine = AsyncLLM(config, core_process=core_process, meanwhile=_prepare)
    try:
        from vllm.server.app import build_app
        from vllm.server.audit_share import audited
        from vllm.server.state import ServerState

        check_signals()
        state = ServerState(engine, args, chat_template)
        state.log_templates()
        with audited(state):
            return uvloop.run(serve_app(build_app(state), listener, check_signals, ends_process=True))
    finally:
        engine.shutdown()


def _prepare(tokenizer: Tokenizer | None) -> None:
    """Import what the first requests need, while the core loads the model. Not in a thread: two threads in one cycle
    of imports see half-initialised modules."""
    with timed(logger, "the server's routes prepared"):
        importlib.import_module("vllm.server.app")
        if tokenizer is not None:
            # An unsupported tokenizer is reported to chat requests.
            with contextlib.suppress(ValueError):
                _ = tokenizer.chat_template


async def serve_app(
    app: FastAPI,
    listener: socket.socket,
    check_signals: Callable[[], None] = lambda: None,
    *,
    ends_process: bool = False,
    **options: Any,
) -> int:
    """Serve an application of `build_app` that has its engine, as `serve` does; returns the exit code.

    Args:
        ends_process: the process is to end after this, and is ended should it hang. Else it lives on, with the signal
            handlers that it had.
        options: uvicorn's, in place of ours.
    """
    state: ServerState = app.state.serving
    config = _config(app, state.args, options)
    server = _Server(config, lambda: _announce(state, listener))
    app.state.server = server  # where routes of others look for uvicorn's
    # Imported modules live as long as the process: garbage collection skips them.
    gc.freeze()
    signals = _Signals(state.engine)
    try:
        check_signals()
        await state.load_adapters()
        return await _serve_until_end(state, server, listener, signals, ends_process)
    finally:
        if not ends_process:
            signals.restore()


async def _serve_until_end(
    state: ServerState, server: uvicorn.Server, listener: socket.socket, signals: _Signals, ends_process: bool
) -> int:
    serving = asyncio.create_task(server.serve(sockets=[listener]))
    refreshing = _start_refreshing(server.config) if state.args.enable_ssl_refresh else None
    dead = asyncio.create_task(_wait_dead(state.engine))
    came = asyncio.create_task(signals.came.wait())
    await asyncio.wait((serving, dead, came), return_when=asyncio.FIRST_COMPLETED)
    if serving.done():
        await serving  # it could not begin
        logger.error("the web server ended by itself, and the process with it")
    code = await _end_requests(state, server, dead, signals)
    if ends_process:
        # Even if something hangs, such as a tokenizer in a thread.
        limit = _END_SECONDS + (server.config.timeout_graceful_shutdown or 0)
        watchdog = threading.Timer(limit, _end_now, (code, state.engine))
        watchdog.daemon = True
        watchdog.start()
    server.should_exit = True
    await serving
    if refreshing is not None:
        refreshing.cancel()
    return code


def _start_refreshing(config: uvicorn.Config) -> asyncio.Task[None]:
    from vllm.server.ssl_refresh import refresh_certificates

    if not config.loaded:
        config.load()
    return asyncio.create_task(refresh_certificates(config))


async def _wait_dead(engine: AsyncLLM) -> None:
    logger.error("the engine died, and the server with it: %s", await engine.wait_dead())


async def _end_requests(state: ServerState, server: uvicorn.Server, dead: asyncio.Task[None], signals: _Signals) -> int:
    """Let requests finish as far as the reason to stop allows. Returns the exit code."""
    state.draining = True
    if len(signals.received) < 2 and (signals.received or dead.done()):
        await _drain(state, server, signals)
    signals.hurries = True
    if dead.done():
        await dead
        await _answered(state)
    if state.in_flight:
        logger.warning("requests cut short: %d", len(state.in_flight))
        for task in tuple(state.in_flight):
            task.cancel()
        await _answered(state)
    if dead.done() or not signals.received:
        code = EXIT_FAULT
    else:
        code = 0 if len(signals.received) == 1 else EXIT_SIGNAL + signals.received[-1]
    return code


async def _drain(state: ServerState, server: uvicorn.Server, signals: _Signals) -> None:
    """Wait for the requests that the engine can still finish: with a dead replica, those of the others."""
    loop = asyncio.get_running_loop()
    engine, seconds, num_signals = state.engine, state.args.shutdown_timeout, len(signals.received)
    deadline = loop.time() + seconds
    is_told = False
    while len(signals.received) == num_signals:
        if engine.errored and not engine.num_unfinished_requests:
            return
        if not is_told and (signals.next_counts or not state.in_flight):
            is_told = True
            _tell_drain(state, signals, deadline - loop.time())
        if not state.in_flight or loop.time() >= deadline:
            break
        await asyncio.sleep(0.02)
    # Slow readers may still be receiving answers.
    server.config.timeout_graceful_shutdown = max(1, round(deadline - loop.time()))


def _tell_drain(state: ServerState, signals: _Signals, seconds: float) -> None:
    reason = signal.Signals(signals.received[0]).name if signals.received else "a replica died"
    logger.info("%s: no new requests; in flight: %d, for up to %.3g s", reason, len(state.in_flight), seconds)


async def _answered(state: ServerState) -> None:
    """Wait up to _ANSWER_SECONDS until nothing is in flight."""
    if state.in_flight:
        await asyncio.wait(tuple(state.in_flight), timeout=_ANSWER_SECONDS)


class _Signals:
    """Handles SIGINT and SIGTERM. The first sets `came` and lets the server drain; a further one cuts requests short,
    or ends the process once they are (`hurries`)."""

    def __init__(self, engine: AsyncLLM) -> None:
        self.received: list[int] = []
        self.came = asyncio.Event()
        self.hurries = False
        self._loop = asyncio.get_running_loop()
        self._first_seconds = -_ONE_SIGNAL_SECONDS
        self._engine = engine
        # Not through the loop, which may hang.
        self._before = {each: signal.signal(each, self._take) for each in (signal.SIGINT, signal.SIGTERM)}

    def restore(self) -> None:
        """Give the signals back to the handlers that were there before."""
        for signum, handler in self._before.items():
            # None is a handler that Python cannot set.
            signal.signal(signum, signal.SIG_DFL if handler is None else handler)

    @property
    def next_counts(self) -> bool:
        """Whether a signal would be a further one, not the first one again."""
        return time.monotonic() - self._first_seconds >= _ONE_SIGNAL_SECONDS

    def _take(self, signum: int, frame: FrameType | None) -> None:
        if self.received == [signum] and not self.next_counts:
            return
        if not self.received:
            self._first_seconds = time.monotonic()
        if self.hurries or len(self.received) > 1:
            _end_now(EXIT_SIGNAL + signum, self._engine)
        self.received.append(signum)
        self._loop.call_soon_threadsafe(self.came.set)


def _end_now(code: int, engine: AsyncLLM) -> None:
    engine.kill_cores()
    os._exit(code)


class _Protocol(HttpToolsProtocol):
    """uvicorn's protocol with our error shape."""

    def send_400_response(self, msg: str) -> None:
        from vllm.server.errors import ApiError

        answer = ApiError(400, "the request is not valid HTTP", code="invalid_http").response()
        headers = [*answer.raw_headers, (b"connection", b"close")]
        head = b"".join(name + b": " + value + b"\r\n" for name, value in headers)
        self.transport.write(b"HTTP/1.1 400 Bad Request\r\n" + head + b"\r\n" + bytes(answer.body))
        self.transport.close()


class _Server(uvicorn.Server):
    """uvicorn's server without its signal handlers, and with a callback when it is ready."""

    def __init__(self, config: uvicorn.Config, on_ready: Callable[[], None]) -> None:
        super().__init__(config)
        self._on_ready = on_ready

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self._on_ready()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def _config(app: FastAPI, args: ServerArgs, options: dict[str, Any]) -> uvicorn.Config:
    # Errors only, to our handlers: warnings are about clients, and middleware.py writes the access log. A copy: what
    # others add to one logger's list is not for the other.
    uvicorn_logger = logging.getLogger("uvicorn")
    uvicorn_logger.handlers, uvicorn_logger.propagate = list(logging.getLogger("vllm").handlers), False
    uvicorn_logger.setLevel(logging.ERROR)
    ours: dict[str, Any] = {
        "http": _Protocol,
        "ws": "none",
        "lifespan": "off",
        "log_config": None,
        "access_log": False,
        "server_header": False,
        "timeout_keep_alive": _KEEP_ALIVE_SECONDS,
        "timeout_graceful_shutdown": round(_ANSWER_SECONDS),
        "ssl_keyfile": args.ssl_keyfile,
        "ssl_certfile": args.ssl_certfile,
        "ssl_ca_certs": args.ssl_ca_certs,
        # Who names the certificates that clients must be signed by wants clients to show one.
        "ssl_cert_reqs": args.ssl_cert_reqs or (ssl.CERT_REQUIRED if args.ssl_ca_certs else ssl.CERT_NONE),
    }
    if args.ssl_ciphers is not None:
        ours["ssl_ciphers"] = args.ssl_ciphers
    return uvicorn.Config(app, **{**ours, **options})


def url_of(args: ServerArgs, listener: socket.socket) -> str:
    """The URL of a server with these arguments."""
    scheme = "https" if args.ssl_certfile else "http"
    if args.uds is not None:
        return f"{scheme}+unix://{args.uds}"
    host, port = listener.getsockname()[:2]
    return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"


def _announce(state: ServerState, listener: socket.socket) -> None:
    url = url_of(state.args, listener)
    page = f"a page to try it is at {url}/, " if state.args.page else ""
    names = ", ".join(state.model_names)
    logger.info("ready: %s serves %s; %sthe API's description at %s/docs", url, names, page, url)
