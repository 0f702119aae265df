"""Rows as columns, for CSV and Parquet."""

from __future__ import annotations

import csv
import io
import json
import os
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from vllm.scoring.files import io_errors

FORMATS = ("jsonl", "csv", "parquet")
_INT64 = range(-(2**63), 2**63)


class FieldKinds:
    """The types of the input's fields, so that each is one column of one type in every part of the output. A field of
    only strings, booleans or numbers keeps its type; any other becomes JSON text."""

    def __init__(self) -> None:
        self.types: dict[str, set[type]] = {}  # by field, in the order first seen

    def add(self, fields: dict[str, Any]) -> None:
        for name, value in fields.items():
            types = self.types.setdefault(name, set())
            if value is not None:
                types.add(object if type(value) is int and value not in _INT64 else type(value))

    def type(self, name: str) -> pa.DataType:
        types = self.types[name]
        if types and types <= {int, float}:
            return pa.int64() if types == {int} else pa.float64()
        return pa.bool_() if types == {bool} else pa.string()

    def value(self, name: str, value: Any) -> Any:
        is_json = pa.types.is_string(self.type(name)) and self.types[name] != {str}
        return json.dumps(value, ensure_ascii=False) if is_json and value is not None else value


class Columns:
    """The columns of an output: index, text, the input's fields where no result has their name, and results.

    Args:
        kinds: of the whole input.
        results: columns that a scorer adds to each row.
        spread: the results' column of structs of structs which is, in CSV, one column each of the inner fields.
    """

    def __init__(self, kinds: FieldKinds, results: pa.Schema, spread: str | None = None) -> None:
        own = {"index": pa.int64(), "text": pa.string()}
        self._kinds, self._spread = kinds, spread
        self._kept = {name: kinds.type(name) for name in kinds.types if name not in own and name not in results.names}
        self.schema = pa.schema([*own.items(), *self._kept.items(), *results])

    def encode(self, records: Sequence[dict[str, Any]], form: str, with_header: bool = True) -> bytes:
        """Records as a file in one of FORMATS; `with_header` is for CSV."""
        if form == "jsonl":
            return b"".join(json.dumps(record, ensure_ascii=False).encode() + b"\n" for record in records)
        return self._as_csv(records, with_header) if form == "csv" else as_parquet(self.table(records))

    def table(self, records: Sequence[dict[str, Any]]) -> pa.Table:
        """Records as Arrow's columns. A list may be an array of Arrow's."""
        typed = [self._typed(record) for record in records]
        columns = [_column([record.get(field.name) for record in typed], field.type) for field in self.schema]
        return pa.Table.from_arrays(columns, schema=self.schema)

    def _typed(self, record: dict[str, Any]) -> dict[str, Any]:
        return {name: self._kinds.value(name, value) if name in self._kept else value for name, value in record.items()}

    def _as_csv(self, records: Iterable[dict[str, Any]], with_header: bool) -> bytes:
        """Null is empty, and anything but text is JSON."""
        paths = [path for field in self.schema for path in self._paths(field)]
        file = io.StringIO(newline="")
        writer = csv.writer(file, lineterminator="\n")
        if with_header:
            writer.writerow(".".join(path[-2:]) for path in paths)
        for record in map(self._typed, records):
            values = [_at(record, path) for path in paths]
            writer.writerow(v if v is None or isinstance(v, str) else json.dumps(v, ensure_ascii=False) for v in values)
        return file.getvalue().encode()

    def _paths(self, field: pa.Field) -> list[tuple[str, ...]]:
        if field.name != self._spread:
            return [(field.name,)]
        return [(field.name, outer.name, inner.name) for outer in field.type for inner in outer.type]


def _column(values: list[Any], kind: pa.DataType) -> pa.Array:
    arrays = [value for value in values if isinstance(value, pa.Array)]
    if not arrays:
        return pa.array(values, kind)
    offsets: list[int | None] = []
    end = 0
    for value in values:
        offsets.append(None if value is None else end)
        end += 0 if value is None else len(value)
    return pa.ListArray.from_arrays(pa.array([*offsets, end], pa.int32()), pa.concat_arrays(arrays), type=kind)


def _at(record: dict[str, Any], path: Sequence[str]) -> Any:
    value: Any = record
    for name in path:
        value = None if value is None else value.get(name)
    return value


def write_table(batches: Iterable[Sequence[dict[str, Any]]], path: Path, form: str, columns: Columns) -> None:
    """Write records as one file, csv or parquet, which appears whole or not at all."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with io_errors("write", path):
            if form == "csv":
                with temporary.open("wb") as file:
                    for number, records in enumerate(batches):
                        file.write(columns.encode(records, form, with_header=not number))
            else:
                with pq.ParquetWriter(temporary, columns.schema) as writer:
                    for records in batches:
                        writer.write_table(columns.table(records))
            os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def as_parquet(table: pa.Table) -> bytes:
    file = io.BytesIO()
    pq.write_table(table, file)
    return file.getvalue()


def failures(part: Path) -> Iterator[str | None]:
    """Each row's error, or None, in a file of `Columns.encode`. Raises OSError or ValueError if it cannot be read."""
    if part.suffix == ".parquet":
        yield from pq.read_table(part, columns=["error"])["error"].to_pylist()
    elif part.suffix == ".csv":
        with part.open(encoding="utf-8", newline="") as file:
            yield from (row["error"] or None for row in csv.DictReader(file))
    else:
        with part.open("rb") as file:
            yield from (json.loads(line).get("error") for line in file)
