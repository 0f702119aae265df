"""Which files of a folder hold its weights."""

from __future__ import annotations

import json
import re
from pathlib import Path

LIST_NAME = "model.mapped.json"
"""In a folder of weights, beside the file of all others, the list of what stays in other files."""

TOWER_NAME = "mmproj.safetensors"
"""In a folder of weights, the file of a picture tower that came in a file of its own."""

_OF_OTHER_KINDS = (
    "adapter_model", "consolidated", "mmproj", "optimizer", "rng_state", "scaler", "scheduler", "training_args",
)  # fmt: skip
"""Names that begin so are of files that hold no weights, or hold them again under other names."""

_NUMBERED = re.compile(r"(.+)-(\d+)-of-(\d{1,6})")


def tower_files(folder: Path) -> list[Path]:
    """The files that hold a folder's picture tower; errors as of `shard_files`."""
    own = folder / TOWER_NAME
    return [own] if own.is_file() else shard_files(folder)


def shard_files(folder: Path) -> list[Path]:
    """The files that hold a folder's weights, and the list of mapped ones; without the usual names or an index, all
    files of the kind. ValueError without any, for a broken index, or for a missing shard."""
    mapped = folder / LIST_NAME
    lists = [mapped] if mapped.is_file() else []
    for name in ("model.safetensors", "pytorch_model.bin"):
        single, index = folder / name, folder / f"{name}.index.json"
        if single.is_file():
            return [*lists, single]
        if index.is_file():
            return _indexed_files(folder, index)
    for suffix in ("safetensors", "bin"):
        named = sorted(folder.glob(f"*.{suffix}"))
        if files := [path for path in named if not path.name.startswith(_OF_OTHER_KINDS)]:
            _check_complete(files)
            return files
    raise ValueError(f"{folder.name} has neither model.safetensors nor pytorch_model.bin, nor an index.json of one")


def _check_complete(files: list[Path]) -> None:
    there = {path.name for path in files}
    for path in files:
        if (found := _NUMBERED.fullmatch(path.stem)) is None:
            continue
        stem, width, count = found[1], len(found[2]), found[3]
        for number in range(1, int(count) + 1):
            name = f"{stem}-{number:0{width}}-of-{count}{path.suffix}"
            if name not in there:
                raise ValueError(f"{path.parent.name} lacks the shard {name} that {path.name} is one of")


def _indexed_files(folder: Path, index: Path) -> list[Path]:
    try:
        names = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
    except (json.JSONDecodeError, KeyError, AttributeError, TypeError) as error:
        raise ValueError(f"{folder.name}/{index.name} has no usable weight_map: {error!r}") from None
    for name in names:
        if not (folder / name).is_file():
            raise ValueError(f"{folder.name} lacks the shard {name} that {index.name} names")
    return [folder / name for name in names]
