"""The rows of `vllm score` as columns, for CSV and Parquet."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from vllm.scoring.labels import Labels

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


def result_schema(labels: Labels) -> pa.Schema:
    """The columns of `make_record`'s results; those by label are structs with a field a label."""
    number, integer, string = pa.float64(), pa.int64(), pa.string()
    floats, integers, float_lists, integer_lists = (
        pa.struct([(name, value) for name in labels.names])
        for value in (number, integer, pa.list_(number), pa.list_(integer))
    )
    columns = {"probs": floats, "logprobs": floats, "logits": floats, "ranks": integers}
    columns |= {"label_mass": number, "prediction": string}
    if labels.longest > 1:
        columns |= {"normalized_logprobs": floats, "token_logprobs": float_lists, "token_ranks": integer_lists}
    return pa.schema({**columns, "num_prompt_tokens": integer, "error": string})


def encode_part(records: Sequence[dict[str, Any]], form: str, labels: Labels, kinds: FieldKinds) -> bytes:
    """Records of `make_record` as a file in one of FORMATS; `kinds` are of the whole input."""
    if form == "jsonl":
        return b"".join(json.dumps(record, ensure_ascii=False).encode() + b"\n" for record in records)
    results = result_schema(labels)
    own = {"index": pa.int64(), "text": pa.string()}
    kept = {name: kinds.type(name) for name in kinds.types if name not in own and name not in results.names}
    rows = [
        {name: kinds.value(name, value) if name in kept else value for name, value in record.items()}
        for record in records
    ]
    schema = pa.schema([*own.items(), *kept.items(), *results])
    return _as_csv(rows, schema.names) if form == "csv" else as_parquet(pa.Table.from_pylist(rows, schema=schema))


def as_parquet(table: pa.Table) -> bytes:
    file = io.BytesIO()
    pq.write_table(table, file)
    return file.getvalue()


def _as_csv(rows: Iterable[dict[str, Any]], names: Sequence[str]) -> bytes:
    """With a header; null is empty, and anything but text is JSON."""
    file = io.StringIO(newline="")
    writer = csv.writer(file, lineterminator="\n")
    writer.writerow(names)
    for row in rows:
        values = [row.get(name) for name in names]
        writer.writerow(v if v is None or isinstance(v, str) else json.dumps(v, ensure_ascii=False) for v in values)
    return file.getvalue().encode()


def failures(part: Path) -> Iterator[str | None]:
    """Each row's error, or None, in a file of `encode_part`. Raises OSError or ValueError if it cannot be read."""
    if part.suffix == ".parquet":
        yield from pq.read_table(part, columns=["error"])["error"].to_pylist()
    elif part.suffix == ".csv":
        with part.open(encoding="utf-8", newline="") as file:
            yield from (row["error"] or None for row in csv.DictReader(file))
    else:
        with part.open("rb") as file:
            yield from (json.loads(line).get("error") for line in file)
