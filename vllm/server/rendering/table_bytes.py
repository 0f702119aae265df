"""Arrays as bytes: JSON, .npy files in base64, safetensors, Arrow's stream format."""

from __future__ import annotations

import base64
import io
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import msgspec
import numpy as np

from vllm.server.errors import ApiError
from vllm.server.rendering.written_json import ENTRIES_PER_TURN, Written, turn
from vllm.utils.npy import npy

PIECE_BYTES = 3 * 2**19
"""Bytes of an array that take about a millisecond to encode; a multiple of 3, as base64 counts."""

_SAFETENSORS_TYPES = {"float32": "F32", "int32": "I32"}


async def json_of(array: np.ndarray, as_base64: bool) -> Written:
    """The array as lists, null for what is not finite, or as a .npy file in base64."""
    parts = []
    if as_base64:
        data = npy(array)
        for start in range(0, len(data), PIECE_BYTES):
            if start:
                await turn()
            parts.append(base64.b64encode(data[start : start + PIECE_BYTES]))
        return Written([b'"', *parts, b'"'])
    step = rows_a_piece(array, ENTRIES_PER_TURN)
    for start in range(0, len(array), step):
        if start:
            await turn()
            parts.append(b",")
        parts.append(msgspec.json.encode(array[start : start + step].tolist())[1:-1])
    return Written([b"[", *parts, b"]"])


def rows_a_piece(array: np.ndarray, num_cells: int) -> int:
    """How many of its rows have up to `num_cells` cells, at least one."""
    return max(1, num_cells // max(1, math.prod(array.shape[1:])))


def safetensors_parts(parts: Sequence[Mapping[str, np.ndarray]], metadata: Mapping[str, str]) -> Iterator[Any]:
    """A safetensors file, in pieces, of tensors that are the rows of all `parts`, which have the same names."""
    header: dict[str, Any] = {"__metadata__": metadata}
    start = 0
    for name, first in parts[0].items():
        shape = [sum(len(part[name]) for part in parts), *first.shape[1:]]
        stop = start + math.prod(shape) * first.itemsize
        header[name] = {
            "dtype": _SAFETENSORS_TYPES[first.dtype.name],
            "shape": shape,
            "data_offsets": [start, stop],
        }
        start = stop
    text = msgspec.json.encode(header)
    text += b" " * (-len(text) % 8)
    yield len(text).to_bytes(8, "little") + text
    for name in parts[0]:
        for part in parts:
            data = np.ascontiguousarray(part[name]).reshape(-1).view(np.uint8).data
            yield from (data[start : start + PIECE_BYTES] for start in range(0, len(data), PIECE_BYTES))


class ArrowStream:
    """Arrow's stream format of rows: vectors are columns of numbers, tables of lists of a fixed size. ApiError: pyarrow
    is not installed."""

    def __init__(self) -> None:
        try:
            import pyarrow
        except ImportError:
            message = "Accept: an answer in Arrow's format needs pyarrow on the server: pip install 'vllm[arrow]'"
            raise ApiError(406, message, code="missing_extra") from None
        self._pa = pyarrow
        self._sink = io.BytesIO()
        self._writer: Any = None

    def batch(self, arrays: Mapping[str, np.ndarray], metadata: Mapping[str, str]) -> bytes:
        """A record batch; the first one has the schema before it. Tables without columns are left out, as lists of size
        0 have no type."""
        pa = self._pa
        columns = {name: self._column(array) for name, array in arrays.items() if 0 not in array.shape[1:]}
        schema = pa.schema([pa.field(name, each.type) for name, each in columns.items()], metadata=dict(metadata))
        if self._writer is None:
            self._writer = pa.ipc.new_stream(self._sink, schema)
        self._writer.write_batch(pa.record_batch(list(columns.values()), schema=schema))
        return self._taken()

    def end(self) -> bytes:
        """The bytes that end the stream."""
        self._writer.close()
        return self._taken()

    def _column(self, array: np.ndarray) -> Any:
        # Without a copy; pa.array would import pandas.
        kind = getattr(self._pa, array.dtype.name)()
        data = self._pa.py_buffer(np.ascontiguousarray(array))
        flat = self._pa.Array.from_buffers(kind, array.size, [None, data])
        return flat if array.ndim == 1 else self._pa.FixedSizeListArray.from_arrays(flat, array.shape[1])

    def _taken(self) -> bytes:
        data = self._sink.getvalue()
        self._sink.seek(0)
        self._sink.truncate()
        return data
