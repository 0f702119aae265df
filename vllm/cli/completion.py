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
    parser.add_argument("shell", metavar="SHELL", choices=_SHELLS, help=", ".join(_SHELLS))


def run(args: argparse.Namespace) -> int:
    import argcomplete

    print(argcomplete.shellcode(["vllm"], shell=args.shell))
    return 0


def answer_shell(parser: argparse.ArgumentParser, **options: Any) -> None:
    """Print the completions of the line in COMP_LINE for the shell, and exit; `options` are argcomplete's."""
    import argcomplete

    argcomplete.autocomplete(parser, always_complete_options=False, **options)
