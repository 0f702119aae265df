"""Reads a GGUF file's header in one pass, and tensors when they are requested."""

from __future__ import annotations

import math
import struct
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from vllm.config.checkpoint.local_model import GGUF_MAGIC, all_parts

_VERSIONS = (2, 3)
_DEFAULT_ALIGNMENT = 32
# GGUF's value types; 8 is a string and 9 an array.
_SCALARS = {
    0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 7: "<?", 10: "<Q", 11: "<q", 12: "<d",
}  # fmt: skip
_STRING, _ARRAY = 8, 9


@dataclass(frozen=True)
class GGUFTensor:
    """Name, type, shape and place of a tensor."""

    name: str
    shape: tuple[int, ...]  # rows first, as in torch
    ggml_type: int  # GGML's number of the quantisation
    start: int  # first byte in its file
    num_bytes: int
    file: Path
    data: np.ndarray  # `file`, mapped


class GGUFFile:
    """A GGUF model: `metadata` holds the header's key-value pairs, `tensors` the tensors by name, in file order; `path`
    is its file, or any of several that it is split into. ValueError if a file is not GGUF, has an unknown version, byte
    order or quantisation, is cut, or is missing."""

    def __init__(self, path: Path) -> None:
        parts = [_Part(part) for part in all_parts(path)]
        self.path = parts[0].path
        self.metadata = parts[0].metadata
        self.tensors: dict[str, GGUFTensor] = {}
        for number, part in enumerate(parts):
            part.check_place(number, len(parts))
            self.tensors |= part.tensors
        expected = self.metadata.get("split.tensors.count", len(self.tensors))
        if len(self.tensors) != expected:
            raise ValueError(f"{self.path.name} has {len(self.tensors)} tensors, expected {expected}")

    def dequantize(self, name: str) -> np.ndarray:
        """The tensor as float32 of its shape."""
        from gguf import GGMLQuantizationType
        from gguf.quants import dequantize

        tensor = self.tensors[name]
        data = np.asarray(self.blocks(name))
        kind = GGMLQuantizationType(tensor.ggml_type)
        if kind in (GGMLQuantizationType.F32, GGMLQuantizationType.F16):
            data = data.view("<f4" if kind is GGMLQuantizationType.F32 else "<f2")
        try:
            return dequantize(data, kind).reshape(tensor.shape)
        except NotImplementedError:
            raise ValueError(
                f"{self.path.name}: tensor {name} has type {kind.name}, expected a float or a type of quantised weights"
            ) from None

    def blocks(self, name: str) -> np.ndarray:
        """The tensor's bytes, uint8 [rows, bytes of a row], mapped."""
        tensor = self.tensors[name]
        return tensor.data[tensor.start : tensor.start + tensor.num_bytes].reshape(math.prod(tensor.shape[:-1]), -1)


class _Part:
    """One file: its header and tensors."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._data = np.memmap(path, mode="r") if path.stat().st_size else np.empty(0, dtype=np.uint8)
        cursor = _Cursor(self._data.data, path.name)
        if cursor.take(4) != GGUF_MAGIC:
            raise ValueError(f"{path.name} is not a GGUF file: it does not begin with 'GGUF'")
        version = cursor.scalar("<I")
        if version & 0xFFFF == 0 and version >> 24 in _VERSIONS:
            raise ValueError(f"{path.name} is big-endian, and only little-endian GGUF files are supported")
        if version not in _VERSIONS:
            raise ValueError(f"{path.name}: GGUF version must be one of {_VERSIONS} (little-endian), got {version}")
        num_tensors, num_pairs = cursor.scalar("<Q"), cursor.scalar("<Q")
        self.metadata: dict[str, Any] = {}
        for _ in range(num_pairs):
            key = cursor.string()
            self.metadata[key] = cursor.value(cursor.scalar("<I"))
        self.tensors = self._read_tensor_table(cursor, num_tensors)

    def check_place(self, number: int, count: int) -> None:
        """ValueError: the header does not say that this is part `number`, from 0, of `count`."""
        found = self.metadata.get("split.no", 0), self.metadata.get("split.count", 1) or 1
        if found != (number, count):
            raise ValueError(
                f"{self.path.name} is file {found[0] + 1} of {found[1]} of a model (split.no, split.count), expected "
                f"{number + 1} of {count}: the files of a split model keep their names, NAME-00001-of-00002.gguf ..."
            )

    def _read_tensor_table(self, cursor: _Cursor, num_tensors: int) -> dict[str, GGUFTensor]:
        from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

        entries: list[tuple[str, tuple[int, ...], int, int]] = []
        for _ in range(num_tensors):
            name = cursor.string()
            shape = tuple(cursor.scalar("<Q") for _ in range(cursor.scalar("<I")))[::-1]
            entries.append((name, shape, cursor.scalar("<I"), cursor.scalar("<Q")))
        alignment = self.metadata.get("general.alignment", _DEFAULT_ALIGNMENT)
        if not isinstance(alignment, int) or alignment < 1:
            raise ValueError(f"{self.path.name}: general.alignment must be a positive number, got {alignment!r}")
        base = -(-cursor.position // alignment) * alignment
        sizes = {int(kind): size for kind, size in GGML_QUANT_SIZES.items()}
        tensors: dict[str, GGUFTensor] = {}
        for name, shape, ggml_type, offset in entries:
            if ggml_type not in sizes:
                known = ", ".join(kind.name for kind in GGMLQuantizationType)
                raise ValueError(f"{self.path.name}: tensor {name} has type {ggml_type}; known types: {known}")
            if name in tensors:
                raise ValueError(f"{self.path.name} has two tensors {name}")
            if offset % alignment:
                problem = f"begins at byte {offset} of the data, expected a multiple of {alignment}"
                raise ValueError(f"{self.path.name}: tensor {name} {problem}")
            block, block_bytes = sizes[ggml_type]
            if 0 in shape or not shape or shape[-1] % block:
                kind = GGMLQuantizationType(ggml_type).name
                raise ValueError(
                    f"{self.path.name}: tensor {name} of type {kind} has shape {shape}, expected rows of whole blocks "
                    f"of {block} values"
                )
            num_bytes = math.prod(shape) // block * block_bytes
            tensors[name] = GGUFTensor(name, shape, ggml_type, base + offset, num_bytes, self.path, self._data)
        self._check_size(tensors)
        return tensors

    def _check_size(self, tensors: dict[str, GGUFTensor]) -> None:
        in_order = sorted(tensors.values(), key=lambda tensor: tensor.start)
        for one, other in pairwise(in_order):
            if one.start + one.num_bytes > other.start:
                raise ValueError(f"{self.path.name}: tensors {one.name} and {other.name} overlap")
        ends = {name: tensor.start + tensor.num_bytes for name, tensor in tensors.items()}
        cut = next((name for name, end in ends.items() if end > len(self._data)), None)
        if cut is not None:
            raise ValueError(
                f"{self.path.name} is cut short: tensor {cut} ends at byte {ends[cut]}; expected a file of "
                f"{max(ends.values())} bytes, found {len(self._data)}"
            )


class _Cursor:
    """Reads little-endian values one after another."""

    def __init__(self, data: memoryview, name: str) -> None:
        self._data = data
        self._name = name
        self.position = 0

    def take(self, count: int) -> bytes:
        end = self.position + count
        if end > len(self._data):
            raise ValueError(
                f"{self._name} is cut short: expected at least {end} bytes for its header, found {len(self._data)}"
            )
        taken = self._data[self.position : end]
        self.position = end
        return bytes(taken)

    def scalar(self, layout: str) -> Any:
        return struct.unpack(layout, self.take(struct.calcsize(layout)))[0]

    def string(self) -> str:
        # Token texts may be cut inside a character; replaced characters do no harm in a header.
        return self.take(self.scalar("<Q")).decode("utf-8", errors="replace")

    def _strings(self, count: int) -> list[str]:
        """`count` strings, as `string` reads one."""
        data, at, end = self._data, self.position, len(self._data)
        length_at = struct.Struct("<Q").unpack_from
        strings = []
        for _ in range(count):
            start = at + 8
            at = start + length_at(data, at)[0] if start <= end else start
            if at > end:
                self.position = min(start, end)
                self.take(at - self.position)
            strings.append(str(data[start:at], "utf-8", "replace"))
        self.position = at
        return strings

    def value(self, kind: int) -> Any:
        if kind == _STRING:
            return self.string()
        if kind == _ARRAY:
            element, count = self.scalar("<I"), self.scalar("<Q")
            if element in _SCALARS:
                layout = np.dtype(_SCALARS[element]) if element != 7 else np.dtype(np.bool_)
                return np.frombuffer(self.take(count * layout.itemsize), dtype=layout).tolist()
            return self._strings(count) if element == _STRING else [self.value(element) for _ in range(count)]
        if kind not in _SCALARS:
            raise ValueError(f"{self._name}: GGUF value type {kind} is not known")
        return self.scalar(_SCALARS[kind])
