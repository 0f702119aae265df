"""Serve a model over HTTP, as OpenAI's API does.

The API is under /v1, its description at /docs, and a page to try it at /. SIGTERM and Ctrl-C let running requests
finish, for up to --shutdown-timeout seconds, and end with exit code 0. A second signal ends them at once, with exit
code 128 + its number. When the engine dies, so does the server, with exit code 1.

The access log goes to stdout, everything else to stderr.

example: vllm serve --port 8000 --api-key secret
"""

from __future__ import annotations

import argparse
import logging
import math
import os
import re
import signal
from pathlib import Path
from types import FrameType

from vllm import envs
from vllm.cli.generation import add_engine_arguments
from vllm.engine.arg_utils import EngineArgs
from vllm.engine.first_checks import check_first
from vllm.exceptions import CliError
from vllm.logger import init_logger, timed
from vllm.lora.request import NOT_ENABLED
from vllm.scoring.files import read_text
from vllm.server.listening import bind
from vllm.server.lora_modules import check_folders, parse_modules
from vllm.server.server_args import ServerArgs
from vllm.version import __version__

logger = init_logger(__name__)

NAME = "serve"
HELP = "serve a model over HTTP, as OpenAI's API does"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    ServerArgs.add_cli_args(parser)
    add_engine_arguments(parser)


def run(args: argparse.Namespace) -> int:
    """Serve until a signal. Arguments and the model's path are checked before the model loads; Ctrl-C and SIGTERM
    before the server is ready raise KeyboardInterrupt and SystemExit."""
    server_args, engine_args = ServerArgs.from_cli_args(args), EngineArgs.from_cli_args(args)
    check_args(server_args)
    template = template_text(server_args.chat_template)
    if server_args.lora_modules and not engine_args.enable_lora:
        raise CliError(f"--lora-modules: {NOT_ENABLED}")
    try:
        # Each engine reads it when it starts; a bad value must be an error before that.
        envs.engine_hang_timeout_seconds()
        check_folders(parse_modules(server_args.lora_modules))
        check_first(engine_args)
        listener = bind(server_args.host or "", server_args.port, server_args.uds)
    except (ValueError, OSError) as error:
        raise CliError(str(error)) from error
    if envs.logging_level() is None and envs.configures_logging() and not envs.logging_config_path():
        logging.getLogger("vllm").setLevel(logging.INFO)
    logger.info("vLLM %s starts: importing what it needs", __version__)
    # Flags are checked before the slow imports, and the core's process imports its part at the same time.
    from vllm.v1.engine.core_process.start import end_core, start_core

    signals = SignalsBeforeReady()
    core_process = start_core()
    try:
        from vllm.pooling.pairs import check_score_args
        from vllm.server.launcher import serve

        try:
            with timed(logger, "the model found and its configuration read"):
                config = engine_args.create_engine_config()
            check_score_args(config.model_config, server_args.score_template, server_args.score_labels)
        except (ValueError, OSError) as error:
            raise CliError(str(error)) from error
        return serve(config, server_args, template, listener, core_process, signals.check)
    finally:
        end_core(core_process)


class SignalsBeforeReady:
    """From now on until other handlers are set, SIGINT and SIGTERM raise. Python drops what a handler raises in a
    destructor or in a callback, of which imports have many: `check` raises it again."""

    def __init__(self) -> None:
        self._received: int | None = None
        for each in (signal.SIGINT, signal.SIGTERM):
            signal.signal(each, self._take)

    def _take(self, signum: int, frame: FrameType | None) -> None:
        self._received = signum
        self.check()

    def check(self) -> None:
        if self._received == signal.SIGINT:
            raise KeyboardInterrupt
        if self._received is not None:
            raise SystemExit(128 + self._received)


def template_text(given: str | None) -> str | None:
    """The template itself: the text of a file, or what was given. CliError: it cannot be read, or is no Jinja."""
    if given is None:
        return None
    is_text = any(mark in given for mark in "{}\n") and not os.path.isfile(given)
    template = given if is_text else read_text(Path(given))
    _check_syntax(template)
    return template


def _check_syntax(template: str) -> None:
    """CliError: it is no Jinja. Tags of other programs pass, since transformers has some."""
    from jinja2 import Environment, TemplateSyntaxError

    try:
        Environment(extensions=["jinja2.ext.loopcontrols"]).parse(template)
    except TemplateSyntaxError as error:
        if "unknown tag" not in str(error):
            raise CliError(f"--chat-template: line {error.lineno}: {error.message}") from None


def check_args(args: ServerArgs) -> None:
    try:
        args.check_neutral()
        if args.middleware:
            from vllm.server.http.extra_middleware import load_middleware

            for path in args.middleware:
                load_middleware(path)
        if args.calibration is not None:
            from vllm.decisions.calibration import Calibration

            Calibration.load(args.calibration)
        if args.tool_call_parser or args.tool_parser_plugin or args.reasoning_parser or args.reasoning_parser_plugin:
            args.check_parsers()
        parse_modules(args.lora_modules)
        if args.score_template is not None or args.score_labels is not None:
            from vllm.pooling.score_templates import score_template

            score_template(args.score_template, args.score_labels)
    except ValueError as error:
        raise CliError(str(error)) from None
    if not 0 <= args.port <= 65535:
        raise CliError(f"--port must be in 0..65535, got {args.port}")
    if args.root_path and (not args.root_path.startswith("/") or args.root_path.endswith("/")):
        raise CliError(f"--root-path must begin with a slash and not end with one, got {args.root_path!r}")
    for name, least in (("max_prompts_per_request", 1), ("max_num_queued_reqs", 0), ("shutdown_timeout", 0)):
        if not least <= getattr(args, name) < math.inf:
            raise CliError(f"{_flag(name)} must be at least {least}, got {getattr(args, name)}")
    if not 0 <= args.audit_share <= 1:
        raise CliError(f"--audit-share must be in 0..1, got {args.audit_share}")
    if bool(args.audit_share) != (args.audit_reference is not None):
        raise CliError("--audit-share and --audit-reference need each other")
    if args.audit_log is not None and not args.audit_share:
        raise CliError("--audit-log is for --audit-share")
    if args.audit_texts and args.audit_log is None:
        raise CliError("--audit-texts needs --audit-log FILE, which is where they are kept")
    if args.audit_reference is not None:
        from vllm.auditing.models import ModelSpec

        ModelSpec.parse(args.audit_reference, None)
    if not 0 <= args.response_store_mib < math.inf:
        raise CliError(f"--response-store-mib must be at least 0, got {args.response_store_mib}")
    if not 0 < args.max_body_mib < math.inf:
        raise CliError(f"--max-body-mib must be positive, got {args.max_body_mib}")
    for name in ("api_key", "served_model_name", "allowed_origins", "allowed_methods", "allowed_headers"):
        if not all(value.strip() for value in getattr(args, name) or ()):
            raise CliError(f"{_flag(name)} must not be empty")
    for origin in args.allowed_origins or ():
        if origin != "*" and not re.fullmatch(r"https?://[^/\s]+", origin):
            raise CliError(f"--allowed-origins takes * and origins such as https://page.example, got {origin!r}")
    if (args.fingerprint_mode == "custom") != (args.fingerprint_value is not None):
        raise CliError("--fingerprint-mode custom and --fingerprint-value VALUE need each other")
    if args.max_log_len is not None and args.max_log_len < 0:
        raise CliError(f"--max-log-len must be at least 0, got {args.max_log_len}")
    _check_tls(args)


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def _check_tls(args: ServerArgs) -> None:
    import ssl

    for name in ("ssl_keyfile", "ssl_certfile", "ssl_ca_certs"):
        path = getattr(args, name)
        if path is not None and not Path(path).is_file():
            raise CliError(f"{_flag(name)}: there is no file {path}")
    if args.ssl_certfile is None:
        if args.ssl_keyfile is not None or args.ssl_ca_certs is not None:
            raise CliError("--ssl-keyfile and --ssl-ca-certs need --ssl-certfile")
        if args.ssl_cert_reqs or args.ssl_ciphers is not None or args.enable_ssl_refresh:
            raise CliError("--ssl-cert-reqs, --ssl-ciphers and --enable-ssl-refresh need --ssl-certfile")
        return
    if args.ssl_cert_reqs not in (0, 1, 2) or (args.ssl_cert_reqs and args.ssl_ca_certs is None):
        raise CliError(f"--ssl-cert-reqs must be 0, or with --ssl-ca-certs 1 or 2, got {args.ssl_cert_reqs}")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    try:
        # Any password, even a wrong one, keeps OpenSSL from prompting.
        context.load_cert_chain(args.ssl_certfile, args.ssl_keyfile, password="")
    except (ssl.SSLError, OSError) as error:
        raise CliError(f"--ssl-certfile and --ssl-keyfile cannot be used together: {error}") from None
    if args.ssl_ciphers is not None:
        try:
            context.set_ciphers(args.ssl_ciphers)
        except ssl.SSLError as error:
            raise CliError(f"--ssl-ciphers cannot be used: {error}") from None
    if args.ssl_ca_certs is not None:
        try:
            context.load_verify_locations(args.ssl_ca_certs)
        except (ssl.SSLError, OSError) as error:
            raise CliError(f"--ssl-ca-certs cannot be used: {error}") from None
