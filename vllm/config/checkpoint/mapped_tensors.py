"""Tensors that stay in other files, by a list that says where: what a GGUF file's conversion does not copy."""

from __future__ import annotations

import contextlib
import json
import math
import os
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from vllm.config.checkpoint.shards import LIST_NAME

_MOST_COPIES = 4

Identity = list[Any]
"""The identity of a file: see file_identity."""


@dataclass(frozen=True)
class Place:
    """Where a tensor's bytes are.

    Attributes:
        file: which of the list's files.
        start: its first byte there.
        dtype: as torch calls it.
    """

    file: int
    start: int
    shape: tuple[int, ...]
    dtype: str

    @property
    def num_bytes(self) -> int:
        """Size of the whole tensor, in bytes."""
        return math.prod(self.shape) * getattr(torch, self.dtype).itemsize


def file_identity(file: Path) -> Identity:
    """The identity that tells a file from a later one: its whole path, size, and time of modification in ns."""
    stat = file.stat()
    return [str(file.absolute()), stat.st_size, stat.st_mtime_ns]


def write_list(path: Path, files: Sequence[Identity], places: dict[str, Place]) -> None:
    """The list of tensors by their names, which are in these files."""
    tensors = {name: (place.file, place.start, place.shape, place.dtype) for name, place in places.items()}
    _write(path, {"files": [[file] for file in files], "tensors": tensors})


def add_files(path: Path, files: Sequence[Identity]) -> None:
    """Make the list name these files, too, which have the same contents as those that it names, in the same order.
    Some of the others stay: another process may see none but these."""
    content = _read(path)
    pairs = list(zip(files, content["files"], strict=True))
    if any(new not in known for new, known in pairs):
        copies = [[new, *(old for old in known if old != new)][:_MOST_COPIES] for new, known in pairs]
        _write(path, content | {"files": copies})


def read_places(path: Path) -> dict[str, Place]:
    """A list's tensors."""
    return {
        name: Place(file, start, tuple(shape), dtype)
        for name, (file, start, shape, dtype) in _read(path)["tensors"].items()
    }


def block_bytes(folder: Path) -> int:
    """The size of the tensors of bytes that a folder's list names, if it has one."""
    path = folder / LIST_NAME
    if not path.is_file():
        return 0
    return sum(place.num_bytes for place in read_places(path).values() if place.dtype == "uint8")


def find_files(path: Path) -> list[Path]:
    """A list's files. ValueError: one is gone, or is not what it was."""
    return [_unchanged(copies) for copies in _read(path)["files"]]


def iterate_mapped(path: Path) -> Iterator[tuple[str, Tensor]]:
    """Names and tensors of a list, mapped into memory. ValueError: see find_files."""
    mapped = [
        torch.from_file(str(file), shared=False, size=file.stat().st_size, dtype=torch.uint8)
        for file in find_files(path)
    ]
    for name, place in read_places(path).items():
        part = mapped[place.file][place.start : place.start + place.num_bytes]
        yield name, part.view(getattr(torch, place.dtype)).view(place.shape)


def _unchanged(copies: list[list[Any]]) -> Path:
    for name, *identity in copies:
        with contextlib.suppress(OSError):
            if file_identity(Path(name))[1:] == identity:
                return Path(name)
    raise ValueError(f"{Path(copies[0][0]).name} was replaced or removed while its weights were to be read")


def _read(path: Path) -> dict[str, Any]:
    """Not to be changed: a start reads the list several times, and one of many experts takes long to parse."""
    stat = path.stat()
    return _parsed(path, stat.st_ino, stat.st_mtime_ns)


@lru_cache(maxsize=1)
def _parsed(path: Path, *_: int) -> dict[str, Any]:
    return dict(json.loads(path.read_text(encoding="utf-8")))


def _write(path: Path, content: dict[str, Any]) -> None:
    """At once, for other processes that read it."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.{threading.get_ident()}")
    temporary.write_text(json.dumps(content), encoding="utf-8")
    temporary.replace(path)


def tensor_places(files: list[Path]) -> Iterator[tuple[Path, int, int]]:
    """The file, first byte and size in bytes of each tensor; none of pickled ones. `files`: as `shard_files` gives
    them. ValueError: a listed file has gone."""
    for path in files:
        if path.name == LIST_NAME:
            mapped = find_files(path)
            for place in read_places(path).values():
                yield mapped[place.file], place.start, place.num_bytes
        elif path.suffix == ".safetensors":
            with path.open("rb") as file:
                length = int.from_bytes(file.read(8), "little")
                header = json.loads(file.read(length))
            for name, entry in header.items():
                if name != "__metadata__":
                    start, stop = entry["data_offsets"]
                    yield path, 8 + length + start, stop - start


def stored_files(files: list[Path]) -> list[Path]:
    """The files themselves, those that a list names among them. ValueError: see tensor_places."""
    return [each for path in files for each in ([path, *find_files(path)] if path.name == LIST_NAME else [path])]
