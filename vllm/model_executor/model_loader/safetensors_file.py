"""Safetensors: streaming a checkpoint's tensors in, and writing a file tensor by tensor."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType

import torch
from torch import Tensor

_DTYPE_NAMES = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}
_DTYPES_BY_NAME = {name: str(dtype).removeprefix("torch.") for dtype, name in _DTYPE_NAMES.items()}


def shard_files(folder: Path) -> list[Path]:
    """The files that hold a folder's weights.

    Raises:
        ValueError: no safetensors, a broken index, or a shard that the index names and the folder lacks.
    """
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
    """Names and tensors of all files, mapped into memory one file after another.

    Raises:
        ValueError: a file that is not safetensors or is cut.
    """
    from safetensors import SafetensorError, safe_open

    for path in files:
        try:
            with safe_open(path, framework="pt") as shard:
                for name in shard.keys():  # noqa: SIM118 (not a dict)
                    yield name, shard.get_tensor(name)
        except SafetensorError as error:
            raise ValueError(f"{path.name} is not a usable safetensors file: {error}") from error


def stored_dtype(files: list[Path]) -> str | None:
    """The dtype of the first tensor that has a known floating-point one, from the header alone, or None."""
    from safetensors import safe_open

    for path in files:
        with safe_open(path, framework="pt") as shard:
            for name in shard.keys():  # noqa: SIM118 (not a dict)
                dtype = _DTYPES_BY_NAME.get(shard.get_slice(name).get_dtype())
                if dtype is not None:
                    return dtype
    return None


class SafetensorsWriter:
    """Writes one file whose tensors come one at a time, in the order of `shapes`, all of one dtype.

    Args:
        path: file to write.
        shapes: shape of each tensor by name.
        dtype: float32, bfloat16 or float16.
    """

    def __init__(self, path: Path, shapes: dict[str, tuple[int, ...]], dtype: torch.dtype) -> None:
        self._dtype = dtype
        self._remaining = list(shapes.items())[::-1]
        header: dict[str, object] = {"__metadata__": {"format": "pt"}}
        end = 0
        for name, shape in shapes.items():
            start, end = end, end + math.prod(shape) * dtype.itemsize
            header[name] = {"dtype": _DTYPE_NAMES[dtype], "shape": list(shape), "data_offsets": [start, end]}
        text = json.dumps(header).encode()
        text += b" " * (-len(text) % 8)  # the data that follows shall be aligned
        self._file = path.open("wb")
        self._file.write(len(text).to_bytes(8, "little") + text)

    def write(self, tensor: Tensor) -> None:
        """Write the next tensor."""
        _, shape = self._remaining.pop()
        assert tuple(tensor.shape) == tuple(shape) and tensor.dtype == self._dtype
        self._file.write(tensor.contiguous().reshape(-1).view(torch.uint8).numpy().data)

    def __enter__(self) -> SafetensorsWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.close()
        assert error is not None or not self._remaining
