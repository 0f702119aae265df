"""Upstream's flags of a command that ask for what it does not do, and those that can change nothing."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping
from typing import Any


class _Refused(argparse.Action):
    """An error wherever the flag is given."""

    def __init__(self, *args: Any, why: str, **options: Any) -> None:
        super().__init__(*args, **options)
        self._why = why

    def __call__(self, parser: Any, namespace: Any, values: Any, option_string: str | None = None) -> None:
        raise argparse.ArgumentError(None, f"{option_string} is not supported: {self._why}")


class _Unused(_Refused):
    """A line that says so."""

    def __call__(self, parser: Any, namespace: Any, values: Any, option_string: str | None = None) -> None:
        print(f"{parser.prog}: {option_string} changes nothing: {self._why}", file=sys.stderr)


def add_refused(parser: argparse.ArgumentParser, flags: Mapping[str, str]) -> None:
    """Add flags, hidden from --help, that are an error; by flag, what to do instead."""
    for flag, why in flags.items():
        parser.add_argument(flag, nargs="*", action=_Refused, why=why, help=argparse.SUPPRESS)


def add_unused(parser: argparse.ArgumentParser, flags: Mapping[str, str], num_values: int) -> None:
    """Add flags, hidden from --help, that are taken with as many values; by flag, why they change nothing."""
    for flag, why in flags.items():
        parser.add_argument(flag, nargs=num_values, action=_Unused, why=why, help=argparse.SUPPRESS)
