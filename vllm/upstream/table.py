"""The rows of `names.toml`."""

from __future__ import annotations

import functools
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

PATH = Path(__file__).with_name("names.toml")


@dataclass(frozen=True)
class Row:
    """One name of upstream's.

    Attributes:
        place: (module, name) that it is an alias of; None where it stands in the module of its path or is refused.
        takes: its parameters, in order, or after "*" by name; None where they are not listed.
        status: "done", "partly", "refused" or "absent".
        why: what to do instead, or why it is as it is.
        is_function: a refused name is a function, not a class.
    """

    place: tuple[str, str] | None
    takes: tuple[str, ...] | None
    status: str
    why: str
    is_function: bool


@dataclass(frozen=True)
class Table:
    """
    Attributes:
        version: upstream's.
        rooms: an alias of a module or package -> the rooms, the first of which has what is below it, too.
        names: module -> name -> row; a dotted name is a method's.
        packages: every path that has rows below it.
    """

    version: str
    rooms: dict[str, tuple[str, ...]]
    names: dict[str, dict[str, Row]]
    packages: frozenset[str]

    def candidates(self, module: str) -> list[str]:
        """Where the rooms say that `module` is, by the row with the longest path."""
        path, below = module, ""
        while path:
            if path in self.rooms:
                return [room + below for room in self.rooms[path]]
            path, _, last = path.rpartition(".")
            below = f".{last}{below}"
        return []


@functools.cache
def table() -> Table:
    """`names.toml`, read once."""
    data = tomllib.loads(PATH.read_text(encoding="utf-8"))
    rooms = {path: (room,) if isinstance(room, str) else tuple(room) for path, room in data["rooms"].items()}
    names = {
        module: {name: _row(name, value, data["reasons"]) for name, value in rows.items()}
        for module, rows in data["names"].items()
    }
    parts = (path.split(".") for path in (*rooms, *names))
    packages = frozenset(".".join(path[:length]) for path in parts for length in range(1, len(path)))
    return Table(data["version"], rooms, names, packages)


def _row(name: str, value: Any, reasons: dict[str, str]) -> Row:
    if not isinstance(value, dict):
        value = {} if value is True else {"is": value}
    status = next((key for key in ("refused", "absent", "partly") if key in value), "done")
    place = None
    if "is" in value:
        module, _, other = value["is"].partition(":")
        place = (module, other or name)
    takes = tuple(filter(None, value["takes"].split(", "))) if "takes" in value else None
    reason = value.get(status, True)
    why = "" if reason is True else reasons.get(reason, reason)
    return Row(place, takes, status, why, value.get("function", name[0].islower()))
