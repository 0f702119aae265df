"""A folder of part files as the output of a scoring run that is spread over machines.

One process writes: that which started the run. A part appears whole or not at all, and its name says which rows it has:
a run that was killed is continued by scoring the rows without a part.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

from vllm.exceptions import CliError
from vllm.scoring.files import io_errors, lock_for_writing, write_atomically
from vllm.scoring.rows import write_meta

_PART = re.compile(r"part-(\d+)\.(?:jsonl|csv|parquet)")
_HALF_A_PART = re.compile(r"\.part-\d+\.(?:jsonl|csv|parquet)\.\d+\.tmp")


class PartFolder:
    """The folder while it is written. A context manager; of two at once on one folder, the second is an error."""

    def __init__(self, folder: Path, form: str, made_from: dict[str, Any], resume: bool) -> None:
        """
        Args:
            folder: where the parts go; made if it is not there.
            form: the files' suffix.
            made_from: what the rows are made from; as `check_output` accepted it.
            resume: keep the parts that are there.

        Raises:
            CliError: the folder cannot be written, or another process writes to it.
        """
        self._folder = folder
        self._form = form
        with io_errors("write", folder):
            folder.mkdir(exist_ok=True)
            self._descriptor = os.open(folder, os.O_RDONLY)
            try:
                lock_for_writing(self._descriptor, folder)
            except CliError:
                os.close(self._descriptor)
                raise
            for path in folder.iterdir():
                if _HALF_A_PART.fullmatch(path.name) or (not resume and _PART.fullmatch(path.name)):
                    path.unlink()
        if not self.parts():
            write_meta(folder, made_from)

    def __enter__(self) -> PartFolder:
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._descriptor)

    def parts(self) -> dict[int, Path]:
        """The parts that are there, by number."""
        found = ((_PART.fullmatch(path.name), path) for path in self._folder.iterdir())
        return dict(sorted((int(match[1]), path) for match, path in found if match))

    def write(self, number: int, content: bytes) -> None:
        """Add a part.

        Raises:
            CliError: it cannot be written.
        """
        write_atomically(self._folder / f"part-{number:08d}.{self._form}", content)
