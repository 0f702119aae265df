"""Print a script that completes the commands and flags of `vllm` when Tab is pressed.

bash:  eval "$(vllm completion bash)"                              in ~/.bashrc
zsh:   eval "$(vllm completion zsh)"                               in ~/.zshrc, after compinit
fish:  vllm completion fish > ~/.config/fish/completions/vllm.fish
"""

from __future__ import annotations

import argparse
from typing import Any

NAME = "completion"
HELP = "print a script that completes commands and flags in a shell"

_SHELLS = ("bash", "zsh", "fish")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `vllm completion`."""
    parser.add_argument("shell", metavar="SHELL", choices=_SHELLS, help=", ".join(_SHELLS))


def run(args: argparse.Namespace) -> int:
    """Print the script."""
    import argcomplete

    print(argcomplete.shellcode(["vllm"], shell=args.shell))
    return 0


def answer_shell(parser: argparse.ArgumentParser, **options: Any) -> None:
    """Tell a script's function what the line in COMP_LINE can go on with, and end the process.

    Args:
        parser: as build_parser makes it.
        options: further ones of argcomplete.autocomplete.
    """
    import argcomplete

    argcomplete.autocomplete(parser, always_complete_options=False, **options)
