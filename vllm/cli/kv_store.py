"""KV blocks that engines keep in a folder (kv_store), for later ones. Commands of their own count, check and remove
them."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from vllm.cli.kept_files import clear, make_command, show_rows, size_and_use, verify, words
from vllm.exceptions import CliError
from vllm.utils.kv_store.folder import StoreFolder
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
            # The last entry of a key counts: it may have been taken back.
            row["blocks"] += sum(place is not None for place in dict(index.read_new()).values())
            row.update(index.about)
        except (OSError, ValueError) as error:
            row["damage"] = str(error)
    return list(rows.values())


def _line(row: dict[str, Any]) -> str:
    writers = f"{row['writers']} of {row['segments']} segments being written" if row["writers"] else None
    said = words([row.get("dtype"), row.get("quantization"), f"{row['blocks']} blocks", writers, row.get("damage")])
    return f"{size_and_use(row)}  {row['model']}  {said}"


def _stat(args: argparse.Namespace) -> int:
    folder = _folder(args)
    return show_rows(folder, "models", _models(folder), _line, args.json)


def _verify(args: argparse.Namespace) -> int:
    folder = _folder(args)
    return verify(folder, "segments", folder.segments(), folder.verify, args.json)


def _clear(args: argparse.Namespace) -> int:
    return clear(_folder(args), "segments", args.json)


COMMANDS = (
    make_command(
        "stat",
        "which models' blocks are there, and how large they are",
        "Which models' blocks are in a store, from the one that was used last: bytes, blocks, and how many engines "
        "write them. A segment that is being written counts with all of the room that it may take.\n\n"
        "example: vllm kv-store stat /var/cache/blocks\n",
        _stat,
        _add_arguments,
    ),
    make_command(
        "verify",
        "read all blocks and compare their checksums",
        "Read all blocks of a store and compare their checksums. A segment that is damaged is removed.\n\n"
        "The exit code is 0 if all are whole, 1 if one was not or could not be read.\n\n"
        "example: vllm kv-store verify /var/cache/blocks\n",
        _verify,
        _add_arguments,
    ),
    make_command(
        "clear",
        "remove all blocks",
        "Remove all blocks of a store. Engines that run go on, and begin new segments.\n\n"
        "example: vllm kv-store clear /var/cache/blocks\n",
        _clear,
        _add_arguments,
    ),
)
