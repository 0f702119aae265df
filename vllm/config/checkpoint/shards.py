"""Which files of a folder hold its weights."""

from __future__ import annotations

import json
from pathlib import Path

LIST_NAME = "model.mapped.json"
"""In a folder of weights, beside the file of all others, the list of what stays in other files."""

TOWER_NAME = "mmproj.safetensors"
"""In a folder of weights, the file of a picture tower that came in a file of its own."""


def tower_files(folder: Path) -> list[Path]:
    """The files that hold a folder's picture tower; errors as of `shard_files`."""
    own = folder / TOWER_NAME
    return [own] if own.is_file() else shard_files(folder)


def shard_files(folder: Path) -> list[Path]:
    """The files that hold a folder's weights, and the list of mapped ones; ValueError without any, for a broken index,
    or for a missing shard."""
    mapped = folder / LIST_NAME
    lists = [mapped] if mapped.is_file() else []
    for name in ("model.safetensors", "pytorch_model.bin"):
        single, index = folder / name, folder / f"{name}.index.json"
        if single.is_file():
            return [*lists, single]
        if index.is_file():
            return _indexed_files(folder, index)
    raise ValueError(f"{folder.name} has neither model.safetensors nor pytorch_model.bin, nor an index.json of one")


def _indexed_files(folder: Path, index: Path) -> list[Path]:
    try:
        names = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
    except (json.JSONDecodeError, KeyError, AttributeError, TypeError) as error:
        raise ValueError(f"{folder.name}/{index.name} has no usable weight_map: {error!r}") from None
    for name in names:
        if not (folder / name).is_file():
            raise ValueError(f"{folder.name} lacks the shard {name} that {index.name} names")
    return [folder / name for name in names]
