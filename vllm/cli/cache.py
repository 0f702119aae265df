"""Files that earlier starts left on disk: packed weights, which the next start of the same model maps in place of
packing them again. Commands of their own list, check and remove them."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from vllm.cli.kept_files import clear, make_command, show_rows, size_and_use, verify, words
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
    if "model" not in row:
        return f"{size_and_use(row)}  {Path(row['file']).name}: {row['damage']}"
    rank, ranks = row["rank"]
    said = words([row["dtype"], row["quantization"], row["level"], f"rank {rank} of {ranks}" if ranks > 1 else None])
    return f"{size_and_use(row)}  {row['model']}  {said}"


def _list(args: argparse.Namespace) -> int:
    folder = _folder()
    return show_rows(folder, "entries", [_described(entry) for entry in folder.entries()], _line, args.json)


def _verify(args: argparse.Namespace) -> int:
    folder = _folder()
    return verify(folder, "entries", folder.entries(), lambda entry: find_damage(entry.path), args.json)


def _clear(args: argparse.Namespace) -> int:
    return clear(_folder(), "files", args.json)


COMMANDS = (
    make_command(
        "list",
        "packed weights on disk, the one used last first",
        "Packed weights on disk: sizes, when an engine last used them, and of which model they are.\n\n"
        "example: vllm cache list\n",
        _list,
        _add_arguments,
    ),
    make_command(
        "verify",
        "read all packed weights and compare their checksums",
        "Read all packed weights on disk and compare their checksums. What is damaged is removed, so that the next "
        "start packs it again.\n\nThe exit code is 0 if all are whole, 1 if one was not or could not be read.\n\n"
        "example: vllm cache verify\n",
        _verify,
        _add_arguments,
    ),
    make_command(
        "clear",
        "remove all packed weights from disk",
        "Remove all packed weights from disk. Engines that run keep theirs.\n\nexample: vllm cache clear\n",
        _clear,
        _add_arguments,
    ),
)
