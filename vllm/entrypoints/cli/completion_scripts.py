"""Completion scripts for bash, zsh and fish, made from a list of commands.

All three work alike: the words before the cursor say which command it is, the last of them whether a flag waits for its
value, and what is left is a choice among that command's words and flags, or a file.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

_BASH = """\
_vllm() {{
    local current=${{COMP_WORDS[COMP_CWORD]}} previous=${{COMP_WORDS[COMP_CWORD-1]}} where= word words=
    # bash takes --flag=value for three words.
    if [[ $current == = ]]; then
        current=
    elif [[ $previous == = ]]; then
        previous=${{COMP_WORDS[COMP_CWORD-2]}}
    fi
    for word in "${{COMP_WORDS[@]:1:COMP_CWORD-1}}"; do
        case "${{where:+$where }}$word" in
            {paths}) where="${{where:+$where }}$word" ;;
        esac
    done
    case "$where" in
{cases}
    esac
    COMPREPLY=($(compgen -W "$words" -- "$current"))
}}
complete -o default -F _vllm vllm
"""

_ZSH = """\
#compdef vllm
_vllm() {{
    local current=${{words[CURRENT]}} previous=${{words[CURRENT-1]}} where= word
    local -a items
    for word in ${{words[2,CURRENT-1]}}; do
        case "${{where:+$where }}$word" in
            {paths}) where="${{where:+$where }}$word" ;;
        esac
    done
    case "$where" in
{cases}
    esac
    _describe vllm items
}}
compdef _vllm vllm
"""

_FISH = """\
function __vllm_at
    set -l where
    set -l typed (commandline -opc)
    for word in $typed[2..-1]
        switch (string join -- ' ' $where $word)
            case {paths}
                set where $where $word
        end
    end
    test "$where" = "$argv[1]"
end
complete -c vllm -e
{lines}
"""


@dataclass(frozen=True)
class Flag:
    """One option of a command.

    Attributes:
        names: such as ("-h", "--help").
        help: a few words.
        takes_value: whether a value follows.
        choices: the values that it can have; empty: any, such as a file's name.
    """

    names: tuple[str, ...]
    help: str
    takes_value: bool
    choices: tuple[str, ...]


@dataclass(frozen=True)
class Command:
    """A command, or the root of all, whose path is empty.

    Attributes:
        path: the words that lead to it.
        flags: its options.
        words: what can stand without a dash, and its help.
        takes_files: whether a file's name can.
    """

    path: str
    flags: tuple[Flag, ...]
    words: dict[str, str]
    takes_files: bool


def bash(commands: Sequence[Command]) -> str:
    """The script for bash."""
    cases = []
    for command in commands:
        values = _value_cases(command, '{names}) words="{choices}" ;;', "{names}) ;;")
        names = " ".join(name for flag in command.flags for name in flag.names)
        body = [f'"{command.path}")', "    case $previous in", *(f"        {line}" for line in values)]
        body += [f'        *) [[ $current == -* ]] && words="{names}" || words="{" ".join(command.words)}" ;;']
        cases += [*body, "    esac ;;"]
    return _BASH.format(paths=_paths(commands, "|"), cases=_indented(cases))


def zsh(commands: Sequence[Command]) -> str:
    """The script for zsh."""
    cases = []
    for command in commands:
        values = _value_cases(command, "{names}) compadd -- {choices}; return ;;", "{names}) _files; return ;;")
        flags = [f"{name}:{flag.help}" for flag in command.flags for name in flag.names]
        words = [f"{word}:{text}" if text else word for word, text in command.words.items()]
        body = [f'"{command.path}")', "    case $previous in", *(f"        {line}" for line in values), "    esac"]
        body += ["    if [[ $current == -* ]]; then", f"        items=({_zsh_items(flags)})"]
        body += [
            "    else",
            "        _files; return" if command.takes_files else f"        items=({_zsh_items(words)})",
        ]
        cases += [*body, "    fi ;;"]
    return _ZSH.format(paths=_paths(commands, "|"), cases=_indented(cases))


def fish(commands: Sequence[Command]) -> str:
    """The script for fish."""
    lines = []
    for command in commands:
        start = f"complete -c vllm -n '__vllm_at \"{command.path}\"'"
        for word, text in command.words.items():
            lines.append(f"{start} -f -a {word}" + (f" -d {_fish_quoted(text)}" if text else ""))
        for flag in command.flags:
            names = " ".join(f"-l {n[2:]}" if n.startswith("--") else f"-s {n[1:]}" for n in flag.names)
            value = f" -x -a '{' '.join(flag.choices)}'" if flag.choices else " -r -F" if flag.takes_value else ""
            lines.append(f"{start} {names}{value} -d {_fish_quoted(flag.help)}")
    return _FISH.format(paths=_paths(commands, " "), lines="\n".join(lines))


SCRIPTS = {"bash": bash, "zsh": zsh, "fish": fish}


def _paths(commands: Sequence[Command], separator: str) -> str:
    return separator.join(f'"{command.path}"' for command in commands if command.path)


def _value_cases(command: Command, chosen: str, free: str) -> list[str]:
    """A shell's case for each flag with choices, and one for all others that take a value."""
    cases = [
        chosen.format(names="|".join(flag.names), choices=" ".join(flag.choices))
        for flag in command.flags
        if flag.choices
    ]
    others = [name for flag in command.flags if flag.takes_value and not flag.choices for name in flag.names]
    return [*cases, free.format(names="|".join(others))] if others else cases


def _indented(lines: Sequence[str]) -> str:
    return "\n".join(f"        {line}" for line in lines)


def _zsh_items(items: Sequence[str]) -> str:
    return " ".join(map(_zsh_quoted, items))


def _zsh_quoted(text: str) -> str:
    return "'" + text.replace("'", "'\\''") + "'"


def _fish_quoted(text: str) -> str:
    return "'" + text.replace("\\", "\\\\").replace("'", "\\'") + "'"
