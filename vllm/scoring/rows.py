"""The output: a file of rows, or a folder of part files, that a killed run's successor completes.

OUTPUT.meta.json says what the rows are made from (the texts' hash, what is asked, the model). It is written before the
first row, and `--resume` compares it with the command line. Only the process that started the run writes.
"""

from __future__ import annotations

import json
import os
import re
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

from vllm.exceptions import CliError
from vllm.scoring.files import io_errors, lock_for_writing, read_text, write_atomically

_PART = re.compile(r"part-(\d+)\.(?:jsonl|csv|parquet)")
_HALF_A_PART = re.compile(r"\.part-\d+\.(?:jsonl|csv|parquet)\.\d+\.tmp")


def meta_path(output: Path) -> Path:
    """The file that says what an output is made from."""
    return output.with_name(f"{output.name}.meta.json")


def _write_meta(output: Path, made_from: dict[str, Any]) -> None:
    # Once the old rows are gone: a kill must not leave them beside another run's description.
    write_atomically(meta_path(output), f"{json.dumps(made_from, ensure_ascii=False, indent=1)}\n".encode())


def check_output(output: Path, made_from: dict[str, Any], resume: bool, overwrite: bool) -> None:
    """Raise a CliError if the file or folder exists and neither `resume` nor `overwrite` is set, or if its rows are
    made from something else than `made_from`, JSON values by name."""
    if overwrite or not output.exists() or not output.stat().st_size:
        return
    if not resume:
        raise CliError(f"{output} exists; --resume continues it, --overwrite replaces it")
    meta, anew = meta_path(output), "--overwrite starts anew"
    if not meta.exists():
        raise CliError(f"--resume: {meta}, which would tell what {output} is made from, is missing; {anew}")
    differing = differences(meta, made_from)
    if differing is None:
        raise CliError(f"--resume: {meta} is not a JSON object; {anew}")
    if differing:
        raise CliError(f"--resume: {output} was made from {'; '.join(differing)}; {anew}")


def differences(meta: Path, made_from: dict[str, Any]) -> list[str] | None:
    """The entries of `meta` that differ from `made_from`, each in words; None if it is not a JSON object."""
    try:
        known = json.loads(read_text(meta))
    except ValueError:
        known = None
    if not isinstance(known, dict):
        return None
    return [
        f"{name} {known.get(name)!r}, not {made_from.get(name)!r}"
        for name in dict.fromkeys([*made_from, *known])
        if known.get(name) != made_from.get(name)
    ]


class RowFile:
    """The output file, as `check_output` accepted it: first its rows are read (none without `resume`), then others
    appended. A context manager; a second one on the same file is an error."""

    def __init__(self, output: Path, made_from: dict[str, Any], resume: bool) -> None:
        self._path = output
        self._num_rows = 0
        with io_errors("write", output):
            self._file: IO[bytes] = output.open("a+b")
            lock_for_writing(self._file.fileno(), output, self._file.close)
            if not resume:
                self._file.truncate(0)
            if not self._file.seek(0, os.SEEK_END):
                _write_meta(output, made_from)
            self._file.seek(0)

    def __enter__(self) -> RowFile:
        return self

    def __exit__(self, exception: type[BaseException] | None, *_: object) -> None:
        # Bytes that a failed append left in the buffer fail again, which was reported.
        with io_errors("write", self._path) if exception is None else suppress(OSError):
            self._file.close()

    def read(self, count: int) -> list[dict[str, Any]]:
        """Up to `count` of the next rows that exist. A last line without a line break is cut off."""
        rows: list[dict[str, Any]] = []
        while len(rows) < count:
            line = self._file.readline()
            if not line.endswith(b"\n"):
                if line:
                    self._file.truncate(self._file.tell() - len(line))
                    self._file.seek(0, os.SEEK_END)
                break
            try:
                row = json.loads(line)
            except ValueError:
                row = None
            if not isinstance(row, dict) or row.get("index") != self._num_rows:
                raise CliError(f"{self._path}:{self._num_rows + 1}: not row {self._num_rows}; --overwrite starts anew")
            rows.append(row)
            self._num_rows += 1
        return rows

    def append(self, row: dict[str, Any]) -> None:
        """Write the next row, visible to other processes at once."""
        with io_errors("write", self._path):
            self._file.write(json.dumps(row, ensure_ascii=False).encode() + b"\n")
            self._file.flush()
        self._num_rows += 1


class PartFolder:
    """A folder, as `check_output` accepted it, of part files with the suffix `form`. Each appears whole or not at all;
    its name says which rows it has. A context manager; a second one on the same folder is an error."""

    def __init__(self, folder: Path, form: str, made_from: dict[str, Any], resume: bool) -> None:
        self._folder = folder
        self._form = form
        with io_errors("write", folder):
            folder.mkdir(exist_ok=True)
            self._descriptor = os.open(folder, os.O_RDONLY)
            lock_for_writing(self._descriptor, folder, lambda: os.close(self._descriptor))
            for path in folder.iterdir():
                if _HALF_A_PART.fullmatch(path.name) or (not resume and _PART.fullmatch(path.name)):
                    path.unlink()
        if not self.parts():
            _write_meta(folder, made_from)

    def __enter__(self) -> PartFolder:
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._descriptor)

    def parts(self) -> dict[int, Path]:
        found = ((_PART.fullmatch(path.name), path) for path in self._folder.iterdir())
        return dict(sorted((int(match[1]), path) for match, path in found if match))

    def write(self, number: int, content: bytes) -> None:
        write_atomically(self._folder / f"part-{number:08d}.{self._form}", content)
