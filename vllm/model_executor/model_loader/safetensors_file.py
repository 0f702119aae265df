"""Safetensors: reading a checkpoint's tensors, and writing a file tensor by tensor."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

_DTYPE_NAMES = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}
_DTYPES_BY_NAME = {name: str(dtype).removeprefix("torch.") for dtype, name in _DTYPE_NAMES.items()}
# Progress of shorter work is not shown.
PROGRESS_DELAY_SECONDS = 2.0


def shard_files(folder: Path) -> list[Path]:
    """The files that hold a folder's weights; ValueError without safetensors, for a broken index, or for a missing
    shard."""
    single = folder / "model.safetensors"
    if single.is_file():
        return [single]
    index = folder / "model.safetensors.index.json"
    if not index.is_file():
        if any(folder.glob("pytorch_model*.bin")):
            raise ValueError(
                f"{folder.name} holds its weights as pytorch_model.bin, which is not supported because "
                "loading it can run code; convert it to safetensors (save_pretrained of transformers writes them)"
            )
        raise ValueError(f"{folder.name} has neither model.safetensors nor model.safetensors.index.json")
    try:
        names = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
    except (json.JSONDecodeError, KeyError, AttributeError, TypeError) as error:
        raise ValueError(f"{folder.name}/{index.name} has no usable weight_map: {error!r}") from None
    for name in names:
        if not (folder / name).is_file():
            raise ValueError(f"{folder.name} lacks the shard {name} that {index.name} names")
    return [folder / name for name in names]


def iterate_tensors(files: list[Path]) -> Iterator[tuple[str, Tensor]]:
    """Names and tensors of all files, mapped into memory one file after another; ValueError for a file that is not
    safetensors or is cut."""
    from safetensors import SafetensorError, safe_open

    for path in files:
        try:
            with safe_open(path, framework="pt") as shard:
                for name in shard.keys():  # noqa: SIM118 (not a dict)
                    yield name, shard.get_tensor(name)
        except SafetensorError as error:
            raise ValueError(f"{path.name} is not a usable safetensors file: {error}") from error


def tensor_files(files: list[Path]) -> dict[str, str]:
    """By the names of all tensors, the folder and name of the file that each is in, from their headers alone;
    ValueError as iterate_tensors."""
    from safetensors import SafetensorError, safe_open

    names: dict[str, str] = {}
    for path in files:
        try:
            with safe_open(path, framework="pt") as shard:
                names |= dict.fromkeys(shard.keys(), f"{path.parent.name}/{path.name}")
        except SafetensorError as error:
            raise ValueError(f"{path.name} is not a usable safetensors file: {error}") from error
    return names


def stored_dtype(files: list[Path]) -> str | None:
    """The dtype of the first tensor that has a known floating-point one, or None; read from the header alone."""
    from safetensors import safe_open

    for path in files:
        with safe_open(path, framework="pt") as shard:
            for name in shard.keys():  # noqa: SIM118 (not a dict)
                dtype = _DTYPES_BY_NAME.get(shard.get_slice(name).get_dtype())
                if dtype is not None:
                    return dtype
    return None


def progress_bar(description: str, num_tensors: int, use_tqdm: bool) -> Any:
    """A tqdm bar over tensors, as a context manager; hidden for PROGRESS_DELAY_SECONDS."""
    from tqdm import tqdm

    options: dict[str, Any] = {"unit": "tensor", "delay": PROGRESS_DELAY_SECONDS, "dynamic_ncols": True}
    return tqdm(total=num_tensors, desc=description, disable=not use_tqdm, **options)


class SafetensorsWriter:
    """Writes one file whose tensors come one at a time, in the order of `tensors`: by name, their shapes and dtypes
    (float32, bfloat16, float16 or uint8)."""

    def __init__(self, path: Path, tensors: dict[str, tuple[tuple[int, ...], torch.dtype]]) -> None:
        self._remaining = list(tensors.values())[::-1]
        header: dict[str, object] = {"__metadata__": {"format": "pt"}}
        end = 0
        for name, (shape, dtype) in tensors.items():
            start, end = end, end + math.prod(shape) * dtype.itemsize
            stored = "U8" if dtype == torch.uint8 else _DTYPE_NAMES[dtype]
            header[name] = {"dtype": stored, "shape": list(shape), "data_offsets": [start, end]}
        text = json.dumps(header).encode()
        text += b" " * (-len(text) % 8)  # aligns the data that follows
        self._file = path.open("wb")
        self._file.write(len(text).to_bytes(8, "little") + text)

    def write(self, tensor: Tensor) -> None:
        shape, dtype = self._remaining.pop()
        assert tuple(tensor.shape) == tuple(shape) and tensor.dtype == dtype
        self._file.write(tensor.contiguous().reshape(-1).view(torch.uint8).numpy().data)

    def __enter__(self) -> SafetensorsWriter:
        return self

    def __exit__(self, _: object, error: object, __: object) -> None:
        self._file.close()
        assert error is not None or not self._remaining
