"""GGUF models that are split into several files: NAME-00001-of-00003.gguf and so on."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

_PART = re.compile(r"(?P<stem>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf")


def all_parts(path: Path) -> list[Path]:
    """The files of the model that `path` is, or is any part of, the first one first. ValueError: one is missing."""
    match = _PART.fullmatch(path.name)
    if match is None:
        return [path]
    count = int(match["count"])
    parts = [path.with_name(f"{match['stem']}-{number:05}-of-{count:05}.gguf") for number in range(1, count + 1)]
    missing = [part.name for part in parts if not part.is_file()]
    if missing or path not in parts:
        raise ValueError(f"{path.name} is one of {count} files, of which these are missing: {', '.join(missing)}")
    return parts


def first_parts(paths: Sequence[Path]) -> list[Path]:
    """Of each model, its first file that is among `paths`."""
    models: dict[str, Path] = {}
    for path in sorted(paths):
        models.setdefault(model_stem(path), path)
    return list(models.values())


def model_stem(path: Path) -> str:
    """The model's name: the file's, without what says which part it is."""
    match = _PART.fullmatch(path.name)
    return path.stem if match is None else match["stem"]
