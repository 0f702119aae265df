"""Print a script that completes the commands and flags of `vllm` when Tab is pressed.

bash:  eval "$(vllm completion bash)"                              in ~/.bashrc
zsh:   eval "$(vllm completion zsh)"                               in ~/.zshrc, after compinit
fish:  vllm completion fish > ~/.config/fish/completions/vllm.fish
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator

from vllm.entrypoints.cli.completion_scripts import SCRIPTS, Command, Flag

NAME = "completion"
HELP = "print a script that completes commands and flags in a shell"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `vllm completion`."""
    parser.add_argument("shell", metavar="SHELL", choices=tuple(SCRIPTS), help=", ".join(SCRIPTS))


def run(args: argparse.Namespace) -> int:
    """Print the script."""
    print(SCRIPTS[args.shell](list(commands(args.root))), end="")
    return 0


def commands(parser: argparse.ArgumentParser, path: str = "") -> Iterator[Command]:
    """The parser's command and all below it.

    Args:
        parser: as build_parser makes it.
        path: the words that lead to it, such as "bench latency".
    """
    flags: list[Flag] = []
    words: dict[str, str] = {}
    children: dict[str, argparse.ArgumentParser] = {}
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            children = dict(action.choices)
            words = {choice.dest: choice.help or "" for choice in action._choices_actions}
        elif action.option_strings:
            flags.append(Flag(tuple(action.option_strings), _brief(action), action.nargs != 0, _choices(action)))
        else:
            words.update(dict.fromkeys(_choices(action), ""))
    yield Command(path, tuple(flags), words, takes_files=not words)
    for name, child in children.items():
        yield from commands(child, f"{path} {name}".strip())


def _choices(action: argparse.Action) -> tuple[str, ...]:
    return tuple(map(str, action.choices or ()))


def _brief(action: argparse.Action) -> str:
    """The first line of its help, up to the first semicolon."""
    text = (action.help or "") % {**vars(action), "prog": "vllm"}
    return text.partition("\n")[0].partition(";")[0]
