"""Flags from a YAML file: --config."""

from __future__ import annotations

import argparse
import difflib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from vllm.exceptions import CliError

_FLAG = "--config"


def with_config(parser: argparse.ArgumentParser, arguments: list[str]) -> list[str]:
    """The arguments after the command's name, with the flags of their --config, if any, in front. A flag of the file
    that excludes one of `arguments` is left out; one that is in both is overridden. A CliError names a bad key."""
    finder = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    finder.add_argument(_FLAG, type=Path, nargs="?")
    path = finder.parse_known_args(arguments)[0].config
    if path is None:
        return arguments
    flags = _flags(parser)
    excluded = _excluded(parser, arguments)
    tokens: list[str] = []
    seen: dict[argparse.Action, str] = {}
    for key, value in _read(path).items():
        flag = "--" + str(key).replace("_", "-")
        if flag not in flags:
            near = difflib.get_close_matches(flag, flags, n=1, cutoff=0.0)
            raise CliError(f"{_FLAG} {path}: unknown key {key!r}; the nearest known one is {near[0][2:]!r}")
        action = flags[flag]
        if action in seen:
            raise CliError(f"{_FLAG} {path}: {key!r} and {seen[action]!r} are the same flag")
        seen[action] = str(key)
        if value is not None and action not in excluded:
            tokens += _tokens(f"{_FLAG} {path}: {key}", flag, action, value)
    # --config takes one value: a list before it ends there, and takes no positional argument.
    return [*tokens, f"{_FLAG}={path}", *arguments]


def _flags(parser: argparse.ArgumentParser) -> dict[str, argparse.Action]:
    """The flags that a file may set; of a pair such as --x, --no-x the first."""
    flags = {}
    for action in parser._actions:
        names = [name for name in action.option_strings if name.startswith("--")]
        if isinstance(action, argparse.BooleanOptionalAction):
            names = names[:1]
        if _FLAG not in names and "--help" not in names:
            flags.update(dict.fromkeys(names, action))
    return flags


def _excluded(parser: argparse.ArgumentParser, arguments: Sequence[str]) -> set[argparse.Action]:
    """Flags that exclude one of the command line."""
    given = {argument.partition("=")[0] for argument in arguments}
    found: set[argparse.Action] = set()
    for group in parser._mutually_exclusive_groups:
        if any(given.intersection(action.option_strings) for action in group._group_actions):
            found.update(group._group_actions)
    return found


def _read(path: Path) -> dict[Any, Any]:
    import yaml

    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise CliError(f"{_FLAG} {path}: {error.strerror or error}") from None
    except UnicodeDecodeError:
        raise CliError(f"{_FLAG} {path} is not UTF-8") from None
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f", line {mark.line + 1}" if mark is not None else ""
        raise CliError(f"{_FLAG} {path}{where}: not YAML: {getattr(error, 'problem', None) or error}") from None
    if content is None:
        return {}
    if not isinstance(content, dict):
        raise CliError(f"{_FLAG} {path} must hold `name: value` lines, not a {type(content).__name__}")
    return content


def _tokens(place: str, flag: str, action: argparse.Action, value: Any) -> list[str]:
    """A value as the command line would spell it; argparse then checks it like any other."""
    if isinstance(action, argparse.BooleanOptionalAction) or action.nargs == 0:
        if not isinstance(value, bool):
            raise CliError(f"{place} must be true or false, got {value!r}")
        if value:
            return [flag]
        return [action.option_strings[1]] if isinstance(action, argparse.BooleanOptionalAction) else []
    if isinstance(value, list):
        if action.nargs != "+" or not value:
            expected = "a list of values" if action.nargs == "+" else "one value"
            raise CliError(f"{place} must be {expected}, got {value!r}")
        return [flag, *(_text(place, each) for each in value)]
    return [f"{flag}={_text(place, value)}"]


def _text(place: str, value: Any) -> str:
    if isinstance(value, dict):
        return json.dumps(value)
    if value is None or isinstance(value, (bool, list)):
        # YAML reads on, off, yes and no as booleans, and would turn the word "no" into "False" here.
        raise CliError(f"{place} must be a text or a number, got {value!r}; put a word such as yes or no in quotes")
    return str(value)
