"""Tensors that stay in other files, by a list that says where: what a GGUF file's conversion does not copy."""

from __future__ import annotations

import json
import math
import os
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

# In a folder of weights, beside the file of all others.
LIST_NAME = "model.mapped.json"


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
        """All of the tensor's."""
        return math.prod(self.shape) * getattr(torch, self.dtype).itemsize


def write_list(path: Path, files: Sequence[Path], places: dict[str, Place]) -> None:
    """The list of tensors by their names; `files` are named in it by their whole paths."""
    tensors = {name: (place.file, place.start, place.shape, place.dtype) for name, place in places.items()}
    _write(path, {"files": _names(files), "tensors": tensors})


def move_list(path: Path, files: Sequence[Path]) -> None:
    """Make the list name other `files` with the same contents, in the same order."""
    content = _read(path)
    if content["files"] != _names(files):
        _write(path, content | {"files": _names(files)})


def read_list(path: Path) -> tuple[list[Path], dict[str, Place]]:
    """A list's files and tensors."""
    content = _read(path)
    places = {
        name: Place(file, start, tuple(shape), dtype)
        for name, (file, start, shape, dtype) in content["tensors"].items()
    }
    return [Path(name) for name in content["files"]], places


def iterate_mapped(path: Path) -> Iterator[tuple[str, Tensor]]:
    """Names and tensors of a list, mapped into memory. ValueError: a file is missing or cut."""
    files, places = read_list(path)
    sizes = [0] * len(files)
    for place in places.values():
        sizes[place.file] = max(sizes[place.file], place.start + place.num_bytes)
    mapped = [_map(file, size) for file, size in zip(files, sizes, strict=True)]
    for name, place in places.items():
        part = mapped[place.file][place.start : place.start + place.num_bytes]
        yield name, part.view(getattr(torch, place.dtype)).view(place.shape)


def _map(file: Path, size: int) -> Tensor:
    """The first `size` bytes of a file, which changes to them would not reach."""
    try:
        found = file.stat().st_size
    except OSError as error:
        raise ValueError(f"{file.name} is not where its weights were when it was opened: {error}") from None
    if found < size:
        raise ValueError(f"{file.name} is cut: it has {found} bytes, its weights end at {size}")
    return torch.from_file(str(file), shared=False, size=size, dtype=torch.uint8)


def _names(files: Sequence[Path]) -> list[str]:
    return [str(file.resolve()) for file in files]


def _read(path: Path) -> dict[str, Any]:
    return dict(json.loads(path.read_text(encoding="utf-8")))


def _write(path: Path, content: dict[str, Any]) -> None:
    """At once, for other processes that read it."""
    handle, name = tempfile.mkstemp(prefix=f".{path.name}-", dir=path.parent)
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            json.dump(content, file)
        Path(name).replace(path)
    except BaseException:
        Path(name).unlink()
        raise
