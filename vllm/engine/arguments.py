"""Arguments as fields of dataclasses: one row has an argument's name, type, default, help and what becomes of it."""

from __future__ import annotations

import argparse
import typing
from dataclasses import MISSING, field, fields
from typing import Any

from vllm.config.unserved import is_neutral_value
from vllm.exceptions import shown
from vllm.logger import init_logger, warn_once
from vllm.utils.flag_types import flag_options

logger = init_logger(__name__)


def arg(default: Any, help: str, *, short: str | None = None, flag: bool = True, to: str = "", **options: Any) -> Any:
    """An argument that does something.

    Args:
        short: a further name of its flag.
        flag: whether the command line has it; some of the engine's are the server's there.
        to: the part of VllmConfig that has its value, as "model_config", or "cache_config.num_blocks" where it has
            another name there. Left out: code makes something of it.
        options: of argparse, in place of those of its type.
    """
    said = {"help": help, "short": short, "flag": flag, "to": to, "options": options}
    return field(default=default, metadata=said)


def refused(default: Any, why: str, short: str | None = None) -> Any:
    """An argument of upstream's that is an error at any value but a neutral one."""
    return field(default=default, metadata={"why": why, "refused": True, "short": short})


def unused(default: Any, why: str, short: str | None = None, flag: bool = True) -> Any:
    """An argument of upstream's that can change no result here: at another value than its default, a warning."""
    return field(default=default, metadata={"why": why, "refused": False, "short": short, "flag": flag})


def is_neutral(value: Any, default: Any) -> bool:
    """Whether an argument asks for nothing: it is its default, or neutral by itself."""
    return (isinstance(value, bool) == isinstance(default, bool) and value == default) or is_neutral_value(value)


def check_neutral(args: Any, kind: Any) -> None:
    """Check the arguments of a dataclass `kind` that has only `refused` and `unused` ones.

    Raises:
        ValueError: one asks for what is not done; names it, its value and what to do instead.
    """
    for item in fields(kind):
        value = getattr(args, item.name)
        if is_neutral(value, item.default):
            continue
        if item.metadata["refused"]:
            raise ValueError(f"{item.name}={shown(value)} is not supported: {item.metadata['why']}")
        warn_once(logger, "%s=%s changes nothing: %s", item.name, shown(value), item.metadata["why"])


def passed_on(args: Any, config: str) -> dict[str, Any]:
    """The values that a part of VllmConfig has as they are given, by its fields."""
    places = ((item.name, item.metadata.get("to", "").split(".")) for item in fields(args))
    return {place[-1] if place[1:] else name: getattr(args, name) for name, place in places if place[0] == config}


def add_flags(parser: argparse.ArgumentParser, title: str, kind: Any) -> argparse.ArgumentParser:
    """Add a group with a flag for each argument of a dataclass, but for those whose names a caller's parser has."""
    group = parser.add_argument_group(title)
    hints = typing.get_type_hints(kind)
    for item in fields(kind):
        said, names = item.metadata, ["--" + item.name.replace("_", "-")]
        names += [said["short"]] if said.get("short") else []
        names = [name for name in names if name not in parser._option_string_actions]
        if not names or not said.get("flag", True):
            continue
        options = flag_options(hints[item.name]) | said.get("options", {})
        default = None if item.default is MISSING else item.default
        # Help for flags that are only accepted would hide the others.
        about = said.get("help", argparse.SUPPRESS)
        group.add_argument(*names, dest=item.name, default=default, help=about, **options)
    return parser
