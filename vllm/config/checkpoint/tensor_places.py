"""Where in a checkpoint's files the bytes of its tensors are."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

from vllm.config.checkpoint.mapped_tensors import find_files, read_places
from vllm.config.checkpoint.shards import LIST_NAME


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
