"""Serve a model over HTTP, as OpenAI's API does.

Clients find the API under /v1, its description at /docs, and a page to try it at /. SIGTERM lets running requests
finish, for up to --shutdown-timeout seconds, and ends with exit code 0; Ctrl-C ends them at once, with exit code 130. A
further signal hurries either. When the engine dies, so does the server, with exit code 1.

The access log goes to stdout, everything else to stderr.

example: vllm serve --port 8000 --api-key secret
"""

from __future__ import annotations

import argparse
import logging
import math
import re
import signal
from pathlib import Path
from types import FrameType

from vllm import envs
from vllm.engine.arg_utils import EngineArgs
from vllm.entrypoints.cli.generation import add_engine_arguments
from vllm.entrypoints.openai.server_args import ServerArgs
from vllm.exceptions import CliError
from vllm.scoring.files import read_text

NAME = "serve"
HELP = "serve a model over HTTP, as OpenAI's API does"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `vllm serve`, the engine's among them."""
    ServerArgs.add_cli_args(parser)
    add_engine_arguments(parser)


def run(args: argparse.Namespace) -> int:
    """Serve until told to stop.

    Raises:
        CliError: an argument cannot be honoured, or the model is not there; before the model loads.
        EngineDeadError: the engine could not start.
        KeyboardInterrupt: Ctrl-C before the server was ready.
        SystemExit: SIGTERM before that.
    """
    server_args = ServerArgs.from_cli_args(args)
    check_args(server_args)
    template = None if server_args.chat_template is None else read_text(Path(server_args.chat_template))
    if envs.logging_level() is None:
        logging.getLogger("vllm").setLevel(logging.INFO)
    # What a server is made of takes a moment to import, which a bad flag need not wait for; and the core's process
    # does its part of that meanwhile.
    from vllm.v1.engine.core_start import end_core, start_core

    engine_args = EngineArgs.from_cli_args(args)
    try:
        # Each engine reads it when it starts; a value that is none is an error before that.
        envs.engine_hang_timeout_seconds()
        num_replicas = engine_args.create_parallel_config().data_parallel_size
    except ValueError as error:
        raise CliError(str(error)) from error
    signals = SignalsBeforeReady()
    core_processes = [start_core() for _ in range(num_replicas)]
    try:
        from vllm.entrypoints.openai.launcher import bind, serve

        try:
            listener = bind(server_args.host, server_args.port)
            config = engine_args.create_engine_config()
        except (ValueError, OSError) as error:
            raise CliError(str(error)) from error
        return serve(config, server_args, template, listener, core_processes, signals.check)
    finally:
        for each in core_processes:
            end_core(each)


class SignalsBeforeReady:
    """SIGINT and SIGTERM, from now on until somebody else handles them, end what is being done. Python drops what a
    handler raises in a destructor or in a callback, of which imports have many: `check` raises it again."""

    def __init__(self) -> None:
        self._received: int | None = None
        for each in (signal.SIGINT, signal.SIGTERM):
            signal.signal(each, self._take)

    def _take(self, signum: int, frame: FrameType | None) -> None:
        self._received = signum
        self.check()

    def check(self) -> None:
        """
        Raises:
            KeyboardInterrupt: SIGINT has come.
            SystemExit: SIGTERM has come.
        """
        if self._received == signal.SIGINT:
            raise KeyboardInterrupt
        if self._received is not None:
            raise SystemExit(128 + self._received)


def check_args(args: ServerArgs) -> None:
    """
    Raises:
        CliError: a flag of the server that cannot be honoured; names it.
    """
    if not 0 <= args.port <= 65535:
        raise CliError(f"--port must be in 0..65535, got {args.port}")
    if args.root_path and (not args.root_path.startswith("/") or args.root_path.endswith("/")):
        raise CliError(f"--root-path must begin with a slash and not end with one, got {args.root_path!r}")
    for flag, value, least in (
        ("--max-prompts-per-request", args.max_prompts_per_request, 1),
        ("--max-num-queued-reqs", args.max_num_queued_reqs, 0),
        ("--shutdown-timeout", args.shutdown_timeout, 0),
    ):
        if not least <= value < math.inf:
            raise CliError(f"{flag} must be at least {least}, got {value}")
    if not 0 < args.max_body_mib < math.inf:
        raise CliError(f"--max-body-mib must be positive, got {args.max_body_mib}")
    for flag, values in (
        ("--api-key", args.api_key),
        ("--served-model-name", args.served_model_name),
        ("--allowed-origins", args.allowed_origins),
    ):
        if values is not None and not all(value.strip() for value in values):
            raise CliError(f"{flag} must not be empty")
    for origin in args.allowed_origins or ():
        if origin != "*" and not re.fullmatch(r"https?://[^/\s]+", origin):
            raise CliError(f"--allowed-origins takes * and origins such as https://page.example, got {origin!r}")
    _check_tls(args)


def _check_tls(args: ServerArgs) -> None:
    import ssl

    for flag, path in (
        ("--ssl-keyfile", args.ssl_keyfile),
        ("--ssl-certfile", args.ssl_certfile),
        ("--ssl-ca-certs", args.ssl_ca_certs),
    ):
        if path is not None and not Path(path).is_file():
            raise CliError(f"{flag}: there is no file {path}")
    if args.ssl_certfile is None:
        if args.ssl_keyfile is not None or args.ssl_ca_certs is not None:
            raise CliError("--ssl-keyfile and --ssl-ca-certs need --ssl-certfile")
        return
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    try:
        # A password, wrong as it is, keeps OpenSSL from asking for one.
        context.load_cert_chain(args.ssl_certfile, args.ssl_keyfile, password="")
    except (ssl.SSLError, OSError) as error:
        raise CliError(f"--ssl-certfile and --ssl-keyfile cannot be used together: {error}") from None
    if args.ssl_ca_certs is not None:
        try:
            context.load_verify_locations(args.ssl_ca_certs)
        except (ssl.SSLError, OSError) as error:
            raise CliError(f"--ssl-ca-certs cannot be used: {error}") from None
