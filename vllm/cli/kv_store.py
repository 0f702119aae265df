"""KV blocks that engines keep in a folder (kv_store), for later ones. Commands of their own count, check and remove
them."""

from __future__ import annotations

import argparse
import datetime
import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from vllm.exceptions import CliError
from vllm.utils.kv_store.folder import Segment, StoreFolder
from vllm.utils.kv_store.segment import SegmentIndex

NAME = "kv-store"
HELP = "count, check or remove KV blocks on disk"


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("folder", metavar="DIR", help="the folder that engines were given as kv_store")
    parser.add_argument("--json", action="store_true", help="print JSON")


def _folder(args: argparse.Namespace) -> StoreFolder:
    path = Path(args.folder).expanduser()
    if not path.is_dir():
        raise CliError(f"{path} is not a folder")
    return StoreFolder(path)


def _models(folder: StoreFolder) -> list[dict[str, Any]]:
    """A row for each name that blocks are kept under, from the one that was used last."""
    rows: dict[str, dict[str, Any]] = {}
    for segment in folder.segments():
        empty = {"name": segment.shelf, "model": None, "segments": 0, "blocks": 0, "bytes": 0, "writers": 0}
        row = rows.setdefault(segment.shelf, {**empty, "used": segment.used})
        row["segments"] += 1
        row["bytes"] += segment.size
        row["writers"] += segment.is_written
        try:
            index = SegmentIndex(segment.path)
            row["blocks"] += sum(place is not None for _, place in index.read_new())
            row.update(index.about)
        except (OSError, ValueError) as error:
            row["damage"] = str(error)
    return list(rows.values())


def _line(row: dict[str, Any]) -> str:
    used = datetime.datetime.fromtimestamp(row["used"]).strftime("%Y-%m-%d %H:%M")
    parts = [row.get("dtype"), row.get("quantization"), f"{row['blocks']} blocks"]
    if row["writers"]:
        parts.append(f"{row['writers']} of {row['segments']} segments being written")
    if "damage" in row:
        parts.append(row["damage"])
    return f"{row['bytes'] / 2**30:8.2f} GiB  {used}  {row['model']}  {', '.join(part for part in parts if part)}"


def _stat(args: argparse.Namespace) -> int:
    folder = _folder(args)
    rows = _models(folder)
    if args.json:
        print(json.dumps({"folder": str(folder.path), "models": rows}, indent=2))
        return 0
    for row in rows:
        print(_line(row))
    print(f"{sum(row['bytes'] for row in rows) / 2**30:8.2f} GiB  in {folder.path}")
    return 0


def _verify(args: argparse.Namespace) -> int:
    folder, found = _folder(args), []
    for segment in folder.segments():
        try:
            damage = folder.verify(segment)
        except FileNotFoundError:
            continue
        except OSError as error:
            damage = str(error)
        else:
            if damage is not None:
                folder.remove(segment.path)
        found.append({**_described(segment), "damage": damage})
        if not args.json:
            print(f"{segment.path.name}: {'whole' if damage is None else f'{damage}; removed'}")
    if args.json:
        print(json.dumps({"folder": str(folder.path), "segments": found}, indent=2))
    return 1 if any(row["damage"] for row in found) else 0


def _clear(args: argparse.Namespace) -> int:
    folder = _folder(args)
    removed = folder.clear()
    if args.json:
        print(json.dumps({"folder": str(folder.path), "removed": [_described(each) for each in removed]}, indent=2))
    else:
        size = sum(segment.size for segment in removed)
        print(f"removed {len(removed)} segments, {size / 2**30:.2f} GiB, of {folder.path}")
    return 0


def _described(segment: Segment) -> dict[str, Any]:
    return {"file": str(segment.path), "bytes": segment.size}


def _command(name: str, said: str, description: str, run: Callable[[argparse.Namespace], int]) -> Any:
    return SimpleNamespace(NAME=name, HELP=said, __doc__=description, add_arguments=_add_arguments, run=run)


COMMANDS = (
    _command(
        "stat",
        "which models' blocks are there, and how large they are",
        "Which models' blocks are in a store, from the one that was used last: bytes, blocks, and how many engines "
        "write them. A segment that is being written counts with all of the room that it may take.\n\n"
        "example: vllm kv-store stat /var/cache/blocks\n",
        _stat,
    ),
    _command(
        "verify",
        "read all blocks and compare their checksums",
        "Read all blocks of a store and compare their checksums. A segment that is damaged is removed.\n\n"
        "The exit code is 0 if all are whole, 1 if one was not or could not be read.\n\n"
        "example: vllm kv-store verify /var/cache/blocks\n",
        _verify,
    ),
    _command(
        "clear",
        "remove all blocks",
        "Remove all blocks of a store. Engines that run go on, and begin new segments.\n\n"
        "example: vllm kv-store clear /var/cache/blocks\n",
        _clear,
    ),
)
