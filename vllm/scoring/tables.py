"""Outputs that may be tables: rows are JSONL while they come, and in the end one CSV or Parquet file."""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vllm.exceptions import CliError
from vllm.scoring.batches import BATCH_ROWS
from vllm.scoring.rows import check_output, meta_path
from vllm.scoring.task import Task

if TYPE_CHECKING:
    from vllm.scoring.columns import FieldKinds

_FORMATS = ("jsonl", "csv", "parquet")


@dataclass(frozen=True)
class TableOutput:
    """The file to write, its format, and the JSONL file of its rows, which is the same one unless it is a table."""

    output: Path
    form: str
    rows: Path

    @classmethod
    def of(cls, task: Task) -> TableOutput:
        """CliError: its suffix names no format."""
        output = task.output
        form = output.suffix.lower().lstrip(".") if task.has_tables else "jsonl"
        if form not in _FORMATS:
            raise CliError(f"--output must end in .{', .'.join(_FORMATS)}, got {output.name}")
        return cls(output, form, output if form == "jsonl" else output.with_name(f"{output.name}.rows.jsonl"))

    def paths(self) -> list[tuple[str, Path | None]]:
        """The files to write, and the flags that name them."""
        return [("--output", self.output), ("--output's description", meta_path(self.rows))]

    def field_kinds(self) -> FieldKinds | None:
        """To be told of the input's fields; None: no table is made. CliError: it cannot be."""
        if self.form == "jsonl":
            return None
        try:
            from vllm.scoring.columns import FieldKinds
        except ImportError:
            raise CliError(f"--output: writing .{self.form} needs pyarrow (pip install pyarrow)") from None
        return FieldKinds()

    def check(self, made_from: dict[str, Any], args: argparse.Namespace) -> None:
        """As `check_output`; of a table the rows are resumed, and a finished one is not."""
        if self.rows != self.output and self.output.exists() and not args.overwrite:
            what = "is complete" if args.resume else "exists"
            raise CliError(f"{self.output} {what}; --overwrite replaces it")
        check_output(self.rows, made_from, args.resume, args.overwrite)

    def finish(self, kinds: FieldKinds, task: Task, scorer: Any) -> None:
        """Turn the rows into the table, whose description stays."""
        from vllm.scoring.columns import Columns, write_table

        def batches() -> Iterator[list[dict[str, Any]]]:
            with self.rows.open(encoding="utf-8", newline="\n") as lines:
                while batch := [json.loads(line) for line in islice(lines, BATCH_ROWS)]:
                    yield batch

        columns = Columns(kinds, task.schema(scorer), task.spread)
        write_table(batches(), self.output, self.form, columns)
        os.replace(meta_path(self.rows), meta_path(self.output))
        self.rows.unlink()
