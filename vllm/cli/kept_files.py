"""Commands that list, check and remove files which engines keep in a folder for later ones."""

from __future__ import annotations

import argparse
import datetime
import json
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Protocol

_GIB = 2**30


class KeptFile(Protocol):
    """A file of the folder; `size` in bytes."""

    @property
    def path(self) -> Path: ...

    @property
    def size(self) -> int: ...


class KeptFolder(Protocol):
    """The folder."""

    path: Path

    def remove(self, path: Path) -> None: ...

    def clear(self) -> Sequence[KeptFile]: ...


def size_and_use(row: dict[str, Any]) -> str:
    """How a row's line begins: its `bytes` in GiB, and when it was `used`, in seconds since the epoch."""
    used = datetime.datetime.fromtimestamp(row["used"]).strftime("%Y-%m-%d %H:%M")
    return f"{row['bytes'] / _GIB:8.2f} GiB  {used}"


def words(parts: Iterable[str | None]) -> str:
    """Join the parts that are there with commas."""
    return ", ".join(filter(None, parts))


def show_rows(
    folder: KeptFolder, name: str, rows: list[dict[str, Any]], line: Callable[[dict[str, Any]], str], as_json: bool
) -> int:
    """Print each row and their sum, or JSON in which `name` has them; the exit code."""
    if as_json:
        print(json.dumps({"folder": str(folder.path), name: rows}, indent=2))
        return 0
    for row in rows:
        print(line(row))
    print(f"{sum(row['bytes'] for row in rows) / _GIB:8.2f} GiB  in {folder.path}")
    return 0


def verify(
    folder: KeptFolder, name: str, files: Iterable[Any], damage_of: Callable[[Any], str | None], as_json: bool
) -> int:
    """Check each of the files and remove what is damaged, as `damage_of` says in words; the exit code, 1 if there was
    damage or a file could not be read."""
    found = []
    for each in files:
        try:
            damage = damage_of(each)
        except FileNotFoundError:
            continue
        except OSError as error:
            damage = str(error)
        else:
            if damage is not None:
                folder.remove(each.path)
        found.append({**_described(each), "damage": damage})
        if not as_json:
            print(f"{each.path.name}: {'whole' if damage is None else f'{damage}; removed'}")
    if as_json:
        print(json.dumps({"folder": str(folder.path), name: found}, indent=2))
    return 1 if any(row["damage"] for row in found) else 0


def clear(folder: KeptFolder, name: str, as_json: bool) -> int:
    """Remove all files, which `name` calls; the exit code."""
    removed = folder.clear()
    if as_json:
        print(json.dumps({"folder": str(folder.path), "removed": [_described(each) for each in removed]}, indent=2))
    else:
        size = sum(each.size for each in removed)
        print(f"removed {len(removed)} {name}, {size / _GIB:.2f} GiB, of {folder.path}")
    return 0


def _described(file: KeptFile) -> dict[str, Any]:
    return {"file": str(file.path), "bytes": file.size}


def make_command(
    name: str,
    said: str,
    description: str,
    run: Callable[[argparse.Namespace], int],
    add_arguments: Callable[[argparse.ArgumentParser], None],
) -> Any:
    """A command as `vllm.cli.main` takes it: its name, a line of help, and its page."""
    return SimpleNamespace(NAME=name, HELP=said, __doc__=description, add_arguments=add_arguments, run=run)
