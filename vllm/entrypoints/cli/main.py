"""Entry point of the `vllm` command."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from typing import NoReturn

from vllm import __version__
from vllm.entrypoints.cli import score
from vllm.entrypoints.cli.errors import CliError

_COMMANDS = (score,)

EXIT_USAGE = 2
EXIT_INTERRUPTED = 130
EXIT_BROKEN_PIPE = 141


class _Parser(argparse.ArgumentParser):
    """A parser whose complaint is one line: the engine's flags alone would fill a screen."""

    def error(self, message: str) -> NoReturn:
        self.exit(EXIT_USAGE, f"{self.prog}: error: {message} (see {self.prog} --help)\n")


def build_parser() -> argparse.ArgumentParser:
    """The command's parser, with one subparser a subcommand."""
    parser = _Parser(prog="vllm", description="Read the log-probabilities of chosen tokens, exactly.")
    parser.add_argument("--version", action="version", version=f"%(prog)s {__version__}")
    subparsers = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for module in _COMMANDS:
        subparser = subparsers.add_parser(
            module.NAME,
            help=module.HELP,
            description=module.__doc__,
            formatter_class=argparse.RawTextHelpFormatter,
        )
        module.add_arguments(subparser)
        subparser.set_defaults(run=module.run)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command line.

    Args:
        argv: the arguments after the program's name; None = those of the process.

    Returns:
        The exit code: 0, 1 (some results are missing), 2 (usage or data), 130 (interrupted) or 141 (whoever
        read the output went away).

    Raises:
        SystemExit: --help, --version or bad usage, by argparse (0 or 2).
    """
    _tolerate_narrow_encodings()
    args = build_parser().parse_args(argv)
    try:
        code = args.run(args)
        sys.stdout.flush()
        return code
    except CliError as error:
        print(f"vllm {args.command}: error: {error}", file=sys.stderr)
        return EXIT_USAGE
    except KeyboardInterrupt:
        print(f"vllm {args.command}: interrupted", file=sys.stderr)
        return EXIT_INTERRUPTED
    except BrokenPipeError:
        # The interpreter flushes stdout once more on exit, which would complain again.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_BROKEN_PIPE


def _tolerate_narrow_encodings() -> None:
    """A terminal that cannot show a character shows "?", instead of the run failing at its end."""
    for stream in (sys.stdout, sys.stderr):
        reconfigure = getattr(stream, "reconfigure", None)
        if reconfigure is not None:
            reconfigure(errors="replace")


if __name__ == "__main__":
    sys.exit(main())
