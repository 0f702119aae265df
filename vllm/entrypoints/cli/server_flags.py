"""Flags of the commands that can use a server instead of loading a model."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import fields

from vllm.engine.arg_utils import EngineArgs
from vllm.exceptions import CliError
from vllm.utils.flag_types import positive
from vllm.utils.server_client import API_KEY, TIMEOUT


def add_server_arguments(parser: argparse.ArgumentParser, default_url: str | None = None) -> argparse._ArgumentGroup:
    """Add --url (None: the command loads a model when it is left out), --api-key and --timeout; their group."""
    group = parser.add_argument_group("server")
    instead = " instead of a model in this process" if default_url is None else ""
    url = f"a running server{instead}, as http://HOST:PORT"
    wait = f"longest wait for anything from the server (default: {TIMEOUT:.0f})"
    group.add_argument("--url", metavar="URL", default=default_url, help=url)
    group.add_argument("--api-key", metavar="KEY", help=f"the server's key (default: that of {API_KEY}, if it is set)")
    group.add_argument("--timeout", metavar="SECONDS", type=positive, help=wait)
    return group


def check_server_arguments(args: argparse.Namespace, *others: str, sent: Sequence[str] = ("model",)) -> None:
    """Refuse flags without effect: of the server (these and `others`, whose default is None) without --url; of the
    engine, but for those `sent` to the server, with it."""
    if args.url is None:
        without_effect = [name for name in ("api_key", "timeout", *others) if getattr(args, name) is not None]
        reason = "says how to talk to a server, and needs --url"
    else:
        engine = [item for item in fields(EngineArgs) if item.name not in sent]
        without_effect = [item.name for item in engine if getattr(args, item.name) != item.default]
        reason = "is for a model in this process, and has no effect on the one at --url"
    if without_effect:
        raise CliError(f"--{without_effect[0].replace('_', '-')} {reason}")
