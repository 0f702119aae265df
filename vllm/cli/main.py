"""Entry point of the `vllm` command."""

from __future__ import annotations

import argparse
import os
import sys
import traceback
from collections.abc import Sequence
from types import ModuleType
from typing import NoReturn

from vllm.cli import (
    audit,
    bench,
    cache,
    chat,
    collect_env,
    complete,
    completion,
    decide,
    embed,
    kv_store,
    rerank,
    run_batch,
    score,
    selftest,
    serve,
)
from vllm.cli.frame import COMPLETING, EXIT_USAGE, CommandParser, add_commands, be_command
from vllm.exceptions import CliError, VLLMValidationError
from vllm.utils.packages import needed_by
from vllm.utils.packed import ahead
from vllm.version import __version__

_COMMANDS = (
    serve,
    chat,
    complete,
    score,
    decide,
    rerank,
    embed,
    audit,
    run_batch,
    bench,
    selftest,
    cache,
    kv_store,
    collect_env,
    completion,
)

_REFUSED = {"launch": "`vllm serve` has the render routes"}

EXIT_FAILURE = 1
EXIT_INTERRUPTED = 130
EXIT_BROKEN_PIPE = 141


def build_parser() -> CommandParser:
    parser = CommandParser(prog="vllm", description="Read the log-probabilities of chosen tokens, exactly.")
    parser.add_argument("--version", action="version", version=f"%(prog)s {__version__}")
    add_commands(parser, _COMMANDS, _REFUSED)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command line; None = the process's arguments. Returns the exit code: 0, 1 (a fault, or some results are
    missing), 2 (usage, bad values or data), 130 (interrupted) or 141 (the reader of the output has gone). SystemExit by
    argparse: --help, --version or bad usage (0 or 2)."""
    parser = build_parser()
    if COMPLETING in os.environ:
        completion.answer_shell(parser)
    return _run(parser, argv)


def run_as(prog: str, command: ModuleType) -> NoReturn:
    """Run one command (see `add_commands`) as a program of its own, named `prog` in usage and errors, and exit."""
    parser = CommandParser(prog=prog, description=command.__doc__)
    be_command(parser, command)
    _end(_run(parser, sys.argv[1:]))


def _run(parser: CommandParser, argv: Sequence[str] | None) -> int:
    for output in (sys.stdout, sys.stderr):
        if hasattr(output, "reconfigure"):
            # A terminal that cannot show a character shows "?", instead of the run failing at its end.
            output.reconfigure(errors="replace")
    args = argparse.Namespace(prog=parser.prog, debug=False)
    try:
        try:
            args = parser.parse_args(argv)
            ahead.begin()
            with needed_by(args.prog):
                return args.run(args)
        finally:
            # At the interpreter's exit a closed pipe could not be handled any more.
            sys.stdout.flush()
    except BrokenPipeError:
        # The interpreter flushes stdout once more on exit, which would fail again.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_BROKEN_PIPE
    except KeyboardInterrupt:
        print(f"{args.prog}: interrupted", file=sys.stderr)
        return EXIT_INTERRUPTED
    except (CliError, VLLMValidationError) as error:
        return _report(args, str(error), EXIT_USAGE)
    except Exception as error:
        hint = "" if args.debug else " (--debug shows where)"
        return _report(args, f"{type(error).__name__}: {error}{hint}", EXIT_FAILURE)


def _report(args: argparse.Namespace, message: str, code: int) -> int:
    """Print the error being handled, in one line or with its traceback; `code`."""
    if args.debug:
        traceback.print_exc()
    print(f"{args.prog}: error: {' '.join(message.splitlines())}", file=sys.stderr)
    return code


def _end(code: int) -> NoReturn:
    # Python remembers a KeyboardInterrupt, even a handled one, that came while a module executed a string; under
    # `python -m` it then ends by SIGINT instead of with the exit code. Executing another string clears that.
    exec("pass")
    sys.exit(code)


if __name__ == "__main__":
    _end(main())
