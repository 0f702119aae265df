"""The flags of the commands that can talk to a server instead of loading a model."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import fields

from vllm.engine.arg_utils import EngineArgs
from vllm.exceptions import CliError
from vllm.utils.flag_types import positive
from vllm.utils.server_client import API_KEY, TIMEOUT


def add_server_arguments(parser: argparse.ArgumentParser, default_url: str | None = None) -> argparse._ArgumentGroup:
    """Add --url, --api-key and --timeout, and give back their group.

    Args:
        parser: the command's.
        default_url: of --url; None = the command loads a model when it is left out.
    """
    group = parser.add_argument_group("server")
    instead = " instead of a model in this process" if default_url is None else ""
    group.add_argument(
        "--url", metavar="URL", default=default_url, help=f"a running server{instead}, as http://HOST:PORT"
    )
    group.add_argument("--api-key", metavar="KEY", help=f"the server's key (default: that of {API_KEY}, if it is set)")
    group.add_argument(
        "--timeout",
        metavar="SECONDS",
        type=positive,
        help=f"longest wait for anything from the server (default: {TIMEOUT:.0f})",
    )
    return group


def check_server_arguments(args: argparse.Namespace, *others: str, sent: Sequence[str] = ("model",)) -> None:
    """That no flag is given which the other of --url and a model in this process has no use for.

    Args:
        args: with the engine's and the server's flags.
        others: names of further flags that need --url, whose default is None.
        sent: engine arguments that a server is told, too.

    Raises:
        CliError: names the flag.
    """
    if args.url is None:
        for name in ("api_key", "timeout", *others):
            if getattr(args, name) is not None:
                raise CliError(f"{_flag(name)} says how to talk to a server, and needs --url")
        return
    for item in fields(EngineArgs):
        if item.name not in sent and getattr(args, item.name) != item.default:
            raise CliError(f"{_flag(item.name)} is for a model in this process, and has no effect on the one at --url")


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")
