"""The output file of `vllm score`: one row a text, appended as it is known, and continued after a kill.

OUTPUT.meta.json says what the rows are made from (the texts' hash, labels, template, model). It is written before the
first row, and `--resume` compares it with the command line.
"""

from __future__ import annotations

import json
import os
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

from vllm.exceptions import CliError
from vllm.scoring.files import io_errors, lock_for_writing, read_text, write_atomically


def meta_path(output: Path) -> Path:
    """The file that says what an output is made from."""
    return output.with_name(f"{output.name}.meta.json")


def write_meta(output: Path, made_from: dict[str, Any]) -> None:
    """Write an output's description. Its old rows must be gone: a kill then leaves no rows beside another run's."""
    write_atomically(meta_path(output), f"{json.dumps(made_from, ensure_ascii=False, indent=1)}\n".encode())


def check_output(output: Path, made_from: dict[str, Any], resume: bool, overwrite: bool) -> None:
    """Check that an output may be written.

    Args:
        output: the file or folder, which need not exist.
        made_from: what the rows are made from, by name; values that JSON can hold.
        resume: go on with the rows that are there.
        overwrite: replace them.

    Raises:
        CliError: it exists and neither was asked for; or its rows are made from something else.
    """
    if overwrite or not output.exists() or not output.stat().st_size:
        return
    if not resume:
        raise CliError(f"{output} exists; --resume continues it, --overwrite replaces it")
    meta = meta_path(output)
    if not meta.exists():
        raise CliError(
            f"--resume: {meta}, which would tell what {output} is made from, is missing; --overwrite starts anew"
        )
    differing = differences(meta, made_from)
    if differing is None:
        raise CliError(f"--resume: {meta} is not a JSON object; --overwrite starts anew")
    if differing:
        raise CliError(f"--resume: {output} was made from {'; '.join(differing)}; --overwrite starts anew")


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
    """The output file while it is written: first the rows that are there are read, then others appended.

    A context manager; of two at once on one file, the second is an error.
    """

    def __init__(self, output: Path, made_from: dict[str, Any], resume: bool) -> None:
        """
        Args:
            output, made_from: as `check_output` accepted them.
            resume: keep the rows that are there.

        Raises:
            CliError: the file cannot be written, or another process writes to it.
        """
        self._path = output
        self._num_rows = 0
        with io_errors("write", output):
            self._file: IO[bytes] = output.open("a+b")
            try:
                lock_for_writing(self._file.fileno(), output)
            except CliError:
                self._file.close()
                raise
            if not resume:
                self._file.truncate(0)
            if not self._file.seek(0, os.SEEK_END):
                write_meta(output, made_from)
            self._file.seek(0)

    def __enter__(self) -> RowFile:
        return self

    def __exit__(self, exception: type[BaseException] | None, *_: object) -> None:
        # What a failed append left in the buffer fails again, and was reported.
        with io_errors("write", self._path) if exception is None else suppress(OSError):
            self._file.close()

    def read(self, count: int) -> list[dict[str, Any]]:
        """Up to `count` of the next rows that are there. A last line without its end is cut off.

        Raises:
            CliError: a line that is not the row to be expected; names it.
        """
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
        """Write the next row, so that every other process sees it.

        Raises:
            CliError: it cannot be written.
        """
        with io_errors("write", self._path):
            self._file.write(json.dumps(row, ensure_ascii=False).encode() + b"\n")
            self._file.flush()
        self._num_rows += 1
