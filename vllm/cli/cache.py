"""Files that earlier starts left on disk: packed weights, which the next start of the same model maps in place of
packing them again. Commands of their own list, check and remove them."""

from __future__ import annotations

import argparse
import datetime
import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from vllm.exceptions import CliError
from vllm.utils.packed.file import DamagedFileError, find_damage, read_content
from vllm.utils.packed.folder import Entry, PackedFolder, packed_folder

NAME = "cache"
HELP = "list, check or remove packed weights on disk"


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print JSON")


def _folder() -> PackedFolder:
    folder = packed_folder()
    if folder is None:
        raise CliError("VLLM_PACKED_CACHE=0: packed weights are not kept")
    return folder


def _described(entry: Entry) -> dict[str, Any]:
    """The description of an entry; `damage` where it cannot be read."""
    row: dict[str, Any] = {"file": str(entry.path), "bytes": entry.size, "used": entry.used}
    try:
        return row | read_content(entry.path).about
    except (OSError, DamagedFileError, ValueError, KeyError, TypeError) as error:
        return row | {"damage": str(error)}


def _line(row: dict[str, Any]) -> str:
    used = datetime.datetime.fromtimestamp(row["used"]).strftime("%Y-%m-%d %H:%M")
    if "model" not in row:
        return f"{row['bytes'] / 2**30:8.2f} GiB  {used}  {Path(row['file']).name}: {row['damage']}"
    rank, ranks = row["rank"]
    parts = [row["dtype"], row["quantization"], row["level"], f"rank {rank} of {ranks}" if ranks > 1 else None]
    return f"{row['bytes'] / 2**30:8.2f} GiB  {used}  {row['model']}  {', '.join(part for part in parts if part)}"


def _list(args: argparse.Namespace) -> int:
    folder = _folder()
    rows = [_described(entry) for entry in folder.entries()]
    if args.json:
        print(json.dumps({"folder": str(folder.path), "entries": rows}, indent=2))
        return 0
    for row in rows:
        print(_line(row))
    print(f"{sum(row['bytes'] for row in rows) / 2**30:8.2f} GiB  in {folder.path}")
    return 0


def _verify(args: argparse.Namespace) -> int:
    folder, found = _folder(), []
    for entry in folder.entries():
        try:
            damage = find_damage(entry.path)
        except FileNotFoundError:
            continue
        except OSError as error:
            damage = str(error)
        else:
            if damage is not None:
                folder.remove(entry.path)
        found.append({"file": str(entry.path), "bytes": entry.size, "damage": damage})
        if not args.json:
            print(f"{entry.path.name}: {'whole' if damage is None else f'{damage}; removed'}")
    if args.json:
        print(json.dumps({"folder": str(folder.path), "entries": found}, indent=2))
    return 1 if any(row["damage"] for row in found) else 0


def _clear(args: argparse.Namespace) -> int:
    folder = _folder()
    removed = folder.clear()
    size = sum(entry.size for entry in removed)
    if args.json:
        rows = [{"file": str(entry.path), "bytes": entry.size} for entry in removed]
        print(json.dumps({"folder": str(folder.path), "removed": rows}, indent=2))
    else:
        print(f"removed {len(removed)} files, {size / 2**30:.2f} GiB, of {folder.path}")
    return 0


def _command(name: str, said: str, description: str, run: Callable[[argparse.Namespace], int]) -> Any:
    return SimpleNamespace(NAME=name, HELP=said, __doc__=description, add_arguments=_add_arguments, run=run)


COMMANDS = (
    _command(
        "list",
        "packed weights on disk, the one used last first",
        "Packed weights on disk: sizes, when an engine last used them, and of which model they are.\n\n"
        "example: vllm cache list\n",
        _list,
    ),
    _command(
        "verify",
        "read all packed weights and compare their checksums",
        "Read all packed weights on disk and compare their checksums. What is damaged is removed, so that the next "
        "start packs it again.\n\nThe exit code is 0 if all are whole, 1 if one was not or could not be read.\n\n"
        "example: vllm cache verify\n",
        _verify,
    ),
    _command(
        "clear",
        "remove all packed weights from disk",
        "Remove all packed weights from disk. Engines that run keep theirs.\n\nexample: vllm cache clear\n",
        _clear,
    ),
)
