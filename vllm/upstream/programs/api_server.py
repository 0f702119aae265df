"""The server for programs that build it around an engine of their own; `python -m` of this module is `vllm serve`."""

from __future__ import annotations

if __name__ == "__main__":
    # Before the slow import of the application, which is to run while the engine starts.
    from vllm.cli import main, serve

    main.run_as("python -m vllm.entrypoints.openai.api_server", serve)

import argparse
import socket
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any

from fastapi import FastAPI
from starlette.datastructures import State

from vllm.cli.serve import template_text
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.entrypoints.async_llm import AsyncLLM
from vllm.exceptions import VLLMValidationError
from vllm.server import app, launcher
from vllm.server.audit_share import audited
from vllm.server.server_args import ServerArgs
from vllm.server.state import ServerState
from vllm.upstream.programs.serve import make_arg_parser, validate_parsed_serve_args
from vllm.upstream.serving import fill
from vllm.utils.checks import check_neutral

__all__ = [
    "build_app",
    "build_async_engine_client",
    "build_async_engine_client_from_engine_args",
    "create_server_socket",
    "init_app_state",
    "make_arg_parser",
    "run_server",
    "run_server_worker",
    "setup_server",
    "validate_parsed_serve_args",
]


def build_app(
    args: argparse.Namespace | Mapping[str, Any], supported_tasks: Any = None, model_config: Any = None
) -> FastAPI:
    """The application of a server. Until `init_app_state` has given it an engine, requests are answered 503.

    Args:
        args: of `make_arg_parser`'s parser, or the fields of FrontendArgs, beside which those of an engine's arguments
            may stand; what it lacks, or has as None, has its default.
        supported_tasks, model_config: change nothing; the routes are those of text generation.

    Raises:
        ValueError: an argument of the server that cannot be honoured.
    """
    args = _namespace(args)
    server_args = _server_args(args)
    _check_audit(server_args)
    return app.build_app(ServerState(None, server_args))


def _server_args(args: argparse.Namespace) -> ServerArgs:
    validate_parsed_serve_args(args)
    return ServerArgs.from_cli_args(args)


def _check_audit(args: ServerArgs) -> None:
    """VLLMValidationError: a share of the traffic is to be audited, by a process that nobody would end."""
    if args.audit_share:
        raise VLLMValidationError(
            "audit_share needs the whole life of a server: run_server and `vllm serve` have it, build_app and "
            "init_app_state have not",
            "audit_share",
            args.audit_share,
        )


def _namespace(args: argparse.Namespace | Mapping[str, Any]) -> argparse.Namespace:
    return argparse.Namespace(**args) if isinstance(args, Mapping) else args


async def init_app_state(
    engine_client: AsyncLLM,
    state: State,
    args: argparse.Namespace | Mapping[str, Any],
    supported_tasks: Any = None,
) -> None:
    """Give an application its engine, and the objects by which programs call its endpoints (vllm/upstream/serving.py).

    Args:
        state: `app.state` of an application of `build_app`, or one that such an application gets later.
        args: those of `build_app`.
        supported_tasks: changes nothing.

    Raises:
        CliError: the file of the chat template cannot be read.
        ValueError: an argument that the engine's model has no use for.
    """
    args = _namespace(args)
    if not hasattr(state, "serving"):
        server_args = ServerArgs.from_cli_args(args)
        _check_audit(server_args)
        state.serving = ServerState(None, server_args)
    server: ServerState = state.serving
    server.chat_template = template_text(server.args.chat_template)
    server.check_engine(engine_client)
    server.engine_client = engine_client
    await server.load_adapters()
    server.log_templates()
    # For programs that add routes of their own.
    state.engine_client, state.vllm_config, state.args = engine_client, engine_client.vllm_config, args
    fill(state, server)


@asynccontextmanager
async def build_async_engine_client(
    args: argparse.Namespace, *, usage_context: Any = None, client_config: Mapping[str, Any] | None = None
) -> AsyncIterator[AsyncLLM]:
    """An engine of the command line's arguments, which is shut down at the end of the context.

    Raises:
        ValueError: an argument that cannot be honoured.
        EngineDeadError: the engine could not start.
    """
    engine_args = AsyncEngineArgs.from_cli_args(args)
    async with build_async_engine_client_from_engine_args(
        engine_args, usage_context=usage_context, client_config=client_config
    ) as engine:
        yield engine


@asynccontextmanager
async def build_async_engine_client_from_engine_args(
    engine_args: AsyncEngineArgs, *, usage_context: Any = None, client_config: Mapping[str, Any] | None = None
) -> AsyncIterator[AsyncLLM]:
    """As `build_async_engine_client`, of an engine's arguments."""
    check_neutral("client_config", client_config, "one process serves all replicas")
    engine = AsyncLLM.from_engine_args(engine_args, usage_context=usage_context)
    try:
        yield engine
    finally:
        engine.shutdown()


def create_server_socket(addr: tuple[str, int]) -> socket.socket:
    """A socket of the host and port, which does not listen yet.

    Raises:
        OSError: the address cannot be bound.
    """
    return launcher.bind(addr[0] or "", addr[1], None)


def setup_server(args: argparse.Namespace) -> tuple[str, socket.socket]:
    """Check the server's arguments and bind its address; (URL, socket that does not listen yet).

    Raises:
        ValueError: an argument of the server that cannot be honoured.
        OSError: the address cannot be bound.
    """
    validate_parsed_serve_args(args)
    server_args = ServerArgs.from_cli_args(args)
    listener = launcher.bind(server_args.host or "", server_args.port, server_args.uds)
    return launcher.url_of(server_args, listener), listener


async def run_server(args: argparse.Namespace, **uvicorn_kwargs: Any) -> None:
    """Serve as `vllm serve` does, in the event loop of the main thread; `uvicorn_kwargs` replace our options of
    uvicorn. Errors are those of `setup_server` and `build_async_engine_client`."""
    listen_address, listener = setup_server(args)
    await run_server_worker(listen_address, listener, args, **uvicorn_kwargs)


async def run_server_worker(
    listen_address: str,
    sock: socket.socket,
    args: argparse.Namespace,
    client_config: Mapping[str, Any] | None = None,
    **uvicorn_kwargs: Any,
) -> None:
    """As `run_server`, at what `setup_server` has bound."""
    with sock:
        async with build_async_engine_client(args, client_config=client_config) as engine:
            state = ServerState(None, _server_args(args))
            application = app.build_app(state)
            await init_app_state(engine, application.state, args)
            with audited(state):
                await launcher.serve_app(application, sock, **uvicorn_kwargs)
