"""Messages and answers: one through pipes as plain text, or many in a terminal."""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING

from vllm.cli.generation import check_server_arguments, sampling_params
from vllm.exceptions import CliError

if TYPE_CHECKING:
    from rich.console import Console

# Escape sequences in an answer could move the cursor, retitle the window or write to the clipboard.
_CONTROLS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")
_PROMPT = ">>> "

Answer = Callable[[str], Iterator[str]]


def add_message_argument(parser: argparse.ArgumentParser, flag: str, noun: str) -> None:
    text = f"answer this {noun} and end; left out: read one from stdin, or ask for them if it is a terminal"
    parser.add_argument(flag, "--quick", "-q", dest="message", metavar="TEXT", help=text)


def checked_message(args: argparse.Namespace) -> str | None:
    """The message of the flag or of stdin; None when stdin is a terminal. Checks the server's and the sampling flags,
    too: all this must be right before a model loads."""
    args.model_name = args.model_name or None
    check_server_arguments(args, "model_name", sent=("model", "seed"))
    if args.model and args.model_name not in (None, args.model):
        raise CliError(f"--model-name {args.model_name} and --model {args.model} are two names of one model: give one")
    sampling_params(args)
    message = args.message
    if message is None:
        if sys.stdin.isatty():
            return None
        try:
            message = sys.stdin.read().removesuffix("\n")
        except UnicodeDecodeError as error:
            raise CliError(f"stdin is not {error.encoding} text: {error.reason}") from None
    if not message:
        raise CliError("the message is empty")
    return message


def answer_once(answer: Answer, message: str) -> int:
    """Print one answer as plain text while it is generated; the exit code."""
    for piece in answer(message):
        sys.stdout.write(_printable(piece) if sys.stdout.isatty() else piece)
        sys.stdout.flush()
    sys.stdout.write("\n")
    return 0


def converse(title: str, answer: Answer, commands: Mapping[str, tuple[str, Callable[[], None]]]) -> int:
    """Ask for messages until /exit or Ctrl-D, and show each answer while it is generated; the exit code. Ctrl-C stops
    an answer; at the prompt it ends the command. `commands`: help and function of words such as /reset."""
    import readline  # noqa: F401 - gives input() line editing and a history

    from rich.console import Console
    from rich.text import Text

    console = Console(highlight=False, soft_wrap=True)
    names = {**{name: text for name, (text, _) in commands.items()}, "/exit": "end (or Ctrl-D)"}
    console.print(Text(title, style="bold"))
    console.print(Text(", ".join(f"{name}: {text}" for name, text in names.items()), style="dim"))
    while True:
        try:
            message = input(_PROMPT)
        except EOFError:
            console.print()
            return 0
        word = message.strip()
        if word == "/exit":
            return 0
        if word in commands:
            commands[word][1]()
        elif word.startswith("/") and word[1:].isalpha():
            console.print(Text(f"{word} is no command; there are {', '.join(names)}", style="red"))
        elif word:
            _show(console, answer(message))


def _show(console: Console, pieces: Iterator[str]) -> None:
    from rich.text import Text

    try:
        with console.status("reading"):
            first = next(pieces, "")
        console.print(Text(_printable(first)), end="")
        for piece in pieces:
            console.print(Text(_printable(piece)), end="")
        console.print()
    except KeyboardInterrupt:
        console.print(Text(" [stopped]", style="dim"))
    except (ValueError, RuntimeError, CliError) as error:
        console.print(Text(f"error: {error}", style="red"))


def _printable(text: str) -> str:
    return _CONTROLS.sub("\N{REPLACEMENT CHARACTER}", text)
