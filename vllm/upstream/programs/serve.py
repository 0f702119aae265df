"""`vllm serve` for parsers and programs of the caller's."""

from __future__ import annotations

import argparse

from vllm.cli import serve
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.exceptions import CliError
from vllm.server.server_args import ServerArgs

__all__ = ["ServeSubcommand", "cmd_init", "make_arg_parser", "run_headless", "validate_parsed_serve_args"]


def make_arg_parser(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Add the flags of `vllm serve` to a caller's parser, MODEL as `model_tag`; returns the parser."""
    parser.add_argument("model_tag", nargs="?", help="the same as --model")
    ServerArgs.add_cli_args(parser)
    AsyncEngineArgs.add_cli_args(parser)
    parser.add_argument("--config", metavar="FILE", help="YAML file of further flags")
    return parser


class ServeSubcommand:
    """`vllm serve` for a parser of the caller's, which has subcommands."""

    name = serve.NAME

    @staticmethod
    def cmd(args: argparse.Namespace) -> None:
        """Serve as `vllm serve` does.

        Raises:
            SystemExit: the server ended with another exit code than 0.
            CliError: a bad argument.
        """
        if getattr(args, "model_tag", None) is not None:
            args.model = args.model_tag
        if code := serve.run(args):
            raise SystemExit(code)

    def validate(self, args: argparse.Namespace) -> None:
        """
        Raises:
            ValueError: an argument of the server that cannot be honoured.
        """
        validate_parsed_serve_args(args)

    def subparser_init(self, subparsers: argparse._SubParsersAction) -> argparse.ArgumentParser:
        """Add the command to the caller's; returns its parser."""
        return make_arg_parser(subparsers.add_parser(serve.NAME, help=serve.HELP, description=serve.__doc__))


def cmd_init() -> list[ServeSubcommand]:
    """The commands of this module."""
    return [ServeSubcommand()]


def run_headless(args: argparse.Namespace) -> None:
    """
    Raises:
        ValueError: always; engines without a server of their own are not started.
    """
    raise ValueError("headless is not supported: one server starts all replicas (data_parallel_size) of its machine")


def validate_parsed_serve_args(args: argparse.Namespace) -> None:
    """
    Raises:
        ValueError: an argument of the server that cannot be honoured.
    """
    try:
        serve.check_args(ServerArgs.from_cli_args(args))
    except CliError as error:
        raise ValueError(str(error)) from None
