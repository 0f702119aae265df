"""Reading the texts to score, and writing whole files."""

from __future__ import annotations

import base64
import csv
import fcntl
import io
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import IO, Any, NamedTuple

from vllm.exceptions import CliError

_PARQUET_ROWS = 1024


@dataclass(frozen=True)
class Item:
    line: int  # where it begins in the file, from 1
    text: str
    fields: dict[str, Any]  # of its object or row, the text's included


class TextFile:
    """The items of a file, read again by every iteration and never all in memory.

    JSONL (a line is an object or a string), .csv with a header, or .parquet, where a row counts as a line and what JSON
    lacks is text (dates and decimals) or null (NaN). In UTF-8. A pipe is copied to a temporary file. Iterating stops
    after `limit` texts; a CliError names the file, line and fault, also if there are no texts.
    """

    def __init__(
        self,
        path: Path,
        text_field: str,
        limit: int | None = None,
        takes_ids: bool = False,
        media_fields: Collection[str] = (),
    ) -> None:
        """
        Args:
            takes_ids: the field may hold a list, of token ids, and then the text is empty.
            media_fields: may hold bytes, which become base64, and without the field of the text this is empty.
        """
        self.name = path.name
        self._text_field = _TextField(text_field, takes_ids, frozenset(media_fields))
        self._limit = limit
        self._suffix = path.suffix.lower()
        with io_errors("read", path):
            self._file: IO[bytes] = path.open("rb")
            if not self._file.seekable():
                with self._file as pipe:
                    self._file = tempfile.TemporaryFile()  # noqa: SIM115 - lives as long as this
                    shutil.copyfileobj(pipe, self._file)

    def __iter__(self) -> Iterator[Item]:
        self._file.seek(0)
        items = _parquet_items(self.name, self._file, self._text_field) if self._suffix == ".parquet" else self._lines()
        found = False
        for item in islice(items, self._limit):
            found = True
            yield item
        if not found:
            raise CliError(f"{self.name}: there are no texts in it")

    def _lines(self) -> Iterator[Item]:
        is_csv = self._suffix == ".csv"
        # The csv module needs line breaks as they are. JSON strings may hold U+2028 and the like, which end no line.
        lines = io.TextIOWrapper(self._file, encoding="utf-8-sig", newline="" if is_csv else "\n")
        try:
            yield from (_csv_items if is_csv else _jsonl_items)(self.name, lines, self._text_field)
        except UnicodeDecodeError as error:
            raise CliError(f"{self.name}:{self._undecodable_line()}: not UTF-8 ({error.reason})") from None
        finally:
            lines.detach()

    def _undecodable_line(self) -> int:
        self._file.seek(0)
        for number, line in enumerate(self._file, start=1):
            try:
                line.decode()
            except UnicodeDecodeError:
                return number
        raise AssertionError("every line is UTF-8")


@contextmanager
def io_errors(verb: str, path: Path) -> Iterator[None]:
    """Turns an OSError into a CliError."""
    try:
        yield
    except OSError as error:
        raise CliError(f"cannot {verb} {path}: {error.strerror or error}") from None


def write_atomically(path: Path, content: bytes) -> None:
    """Write a file, or replace it, so that no reader ever sees a part of it."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with io_errors("write", path):
            temporary.write_bytes(content)
            os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def lock_for_writing(descriptor: int, path: Path, close: Callable[[], None]) -> None:
    """Lock the file or folder until it is closed; if another process has the lock, close it: a CliError."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        close()
        raise CliError(f"another process is writing {path}") from None
    except OSError:
        pass  # a file system without locks


def read_text(path: Path) -> str:
    """A file's text, without a byte order mark; a CliError names the line that is not UTF-8."""
    with io_errors("read", path):
        content = path.read_bytes()
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        # The byte order mark is not part of error.object.
        line = error.object[: error.start].count(b"\n") + 1
        raise CliError(f"{path.name}:{line}: not UTF-8 ({error.reason})") from None


def _jsonl_items(name: str, lines: Iterable[str], text_field: _TextField) -> Iterator[Item]:
    for line, source in enumerate(lines, start=1):
        if not source.strip():
            continue
        try:
            value = json.loads(source.removesuffix("\n"))
        except json.JSONDecodeError as error:
            raise CliError(f"{name}:{line}: not JSON: {error.msg} at column {error.colno}") from None
        except ValueError as error:  # an integer of too many digits
            raise CliError(f"{name}:{line}: not JSON: {error}") from None
        except RecursionError:
            raise CliError(f"{name}:{line}: not usable JSON: nested too deeply") from None
        if isinstance(value, str):
            value = {text_field.name: value}
        if not isinstance(value, dict):
            raise CliError(f"{name}:{line}: must be a JSON object or a JSON string, got {_kind(value)}")
        yield _item(name, line, value, text_field)


def _csv_items(name: str, lines: Iterable[str], text_field: _TextField) -> Iterator[Item]:
    reader = csv.reader(lines, strict=True)
    header: list[str] = []
    while True:
        line = reader.line_num + 1
        try:
            row = next(reader, None)
        except csv.Error as error:
            raise CliError(f"{name}:{line}: not CSV: {error}") from None
        if row is None:
            return
        if row and not header:
            header = row
            _check_header(name, line, header, text_field)
        elif row and len(row) != len(header):
            raise CliError(f"{name}:{line}: {len(row)} values, but the header has {len(header)}")
        elif row:
            yield _item(name, line, dict(zip(header, row, strict=True)), text_field)


def _parquet_items(name: str, file: IO[bytes], text_field: _TextField) -> Iterator[Item]:
    try:
        import pyarrow as pa
        import pyarrow.parquet as pq
    except ImportError:
        raise CliError(f"{name}: reading Parquet needs pyarrow (pip install pyarrow)") from None
    try:
        table = pq.ParquetFile(file)
        _check_header(name, 1, table.schema_arrow.names, text_field)
        rows = (row for batch in table.iter_batches(batch_size=_PARQUET_ROWS) for row in batch.to_pylist())
        for line, row in enumerate(rows, start=1):
            fields = {
                field: _as_json(name, field, value, field in text_field.media_fields) for field, value in row.items()
            }
            yield _item(name, line, fields, text_field)
    except pa.ArrowException as error:
        raise CliError(f"{name}: not Parquet: {error}") from None


def _as_json(name: str, field: str, value: Any, takes_bytes: bool) -> Any:
    """A Parquet value as one that JSON can hold."""

    def as_text(other: Any) -> str:
        if isinstance(other, bytes) and takes_bytes:
            return base64.b64encode(other).decode()
        if isinstance(other, bytes):
            raise CliError(f"{name}: column {field!r} holds bytes, which are not text")
        return other.isoformat() if hasattr(other, "isoformat") else str(other)

    return json.loads(json.dumps(value, default=as_text), parse_constant=lambda _: None)


def _check_header(name: str, line: int, header: list[str], text_field: _TextField) -> None:
    repeated = sorted({field for field in header if header.count(field) > 1})
    if repeated:
        raise CliError(f"{name}:{line}: the header has {repeated[0]!r} more than once")
    if text_field.name not in header and text_field.media_fields.isdisjoint(header):
        fields = ", ".join(map(repr, header)) or "none"
        raise CliError(
            f"{name}:{line}: no field {text_field.name!r} in the header, which has {fields} (see --text-field)"
        )


def _item(name: str, line: int, fields: dict[str, Any], text_field: _TextField) -> Item:
    text = text_field.text(f"{name}:{line}", fields)
    try:
        json.dumps(fields, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        raise CliError(f"{name}:{line}: half of a surrogate pair, which is not text") from None
    return Item(line, text, fields)


class _TextField(NamedTuple):
    name: str
    takes_ids: bool
    media_fields: frozenset[str]

    def text(self, place: str, fields: dict[str, Any]) -> str:
        """The field's; a CliError names the place of a wrong one."""
        if self.name not in fields:
            if not self.media_fields.isdisjoint(fields):
                return ""
            known = ", ".join(map(repr, fields)) or "none"
            raise CliError(f"{place}: no field {self.name!r}; there is {known} (see --text-field)")
        text = fields[self.name]
        if isinstance(text, list) and self.takes_ids:
            return ""
        if not isinstance(text, str):
            expected = "a string or a list of token ids" if self.takes_ids else "a string"
            raise CliError(f"{place}: field {self.name!r} must be {expected}, got {_kind(text)}")
        return text


def _kind(value: Any) -> str:
    names = {dict: "an object", list: "a list", str: "a string", bool: "a boolean", type(None): "null"}
    return names.get(type(value), "a number")
