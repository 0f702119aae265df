"""The run of a command over a file: texts in, rows out, by an engine in this process, a server, or a Ray cluster."""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Iterator
from contextlib import closing, nullcontext
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vllm.engine.arg_utils import EngineArgs
from vllm.engine.first_checks import check_first
from vllm.exceptions import CliError
from vllm.scoring.batches import BATCH_ROWS, Progress, batches, deciding
from vllm.scoring.files import TextFile
from vllm.scoring.report import RowReport, Timing
from vllm.scoring.rows import RowFile, check_output, meta_path
from vllm.scoring.scorers import Scorer
from vllm.scoring.task import Task

if TYPE_CHECKING:
    from vllm.entrypoints.llm import LLM
    from vllm.scoring.columns import FieldKinds


def complete_file(args: argparse.Namespace, kind: type[Task]) -> int:
    """Complete the output to one row a text, and report; 0, or 1 when some of the texts failed."""
    if args.backend is not None:
        from vllm.scoring.ray_backend import complete_on_ray

        return complete_on_ray(args, kind)
    task = kind(args)
    if task.has_parts:
        return complete_in_parts(args, task)
    table = TableOutput.of(task)
    _check_paths(task, table)
    kinds = table.field_kinds()
    texts, made_from = task.read_texts(args, kinds)
    with nullcontext() if args.url is None else task.server_kind(args) as server:
        made_from |= deciding(args, task.more_deciding) if server is None else server.deciding()
        table.check(made_from, args)
        began = time.perf_counter()
        scorer: Scorer = task.engine_scorer(load(args)) if server is None else task.server_scorer(server)
        loaded = time.perf_counter()
        report = task.report(scorer)
        bar = closing(Progress(made_from["num_texts"], shown=not args.quiet))
        with RowFile(table.rows, made_from, args.resume) as rows, bar as progress:
            _complete(texts, rows, scorer, report, progress)
        timing = Timing(loaded - began, time.perf_counter() - loaded)
    if kinds is not None:
        table.finish(kinds, task, scorer)
    report.conclude(table.output, scorer.model_name, timing, args.quiet)
    return 1 if report.print_failures("first") else 0


def complete_in_parts(args: argparse.Namespace, task: Task) -> int:
    """See `complete_parts`. CliError: pyarrow is not installed."""
    try:
        from vllm.scoring.part_files import complete_parts
    except ImportError:
        raise CliError("--output: writing .parquet needs pyarrow (pip install 'vllm[arrow]')") from None
    return complete_parts(args, task, load)


def load(args: argparse.Namespace) -> LLM:
    """The engine that the arguments describe; a CliError if there is none."""
    try:
        engine_args = EngineArgs.from_cli_args(args)
        engine_args.use_tqdm_on_load &= not args.quiet
        check_first(engine_args)
        # Needs torch.
        from vllm.entrypoints.llm import LLM

        return LLM(**vars(engine_args))
    except (ValueError, OSError) as error:
        raise CliError(str(error)) from error


def _check_paths(task: Task, table: TableOutput) -> None:
    """A CliError, which names the flag, if a path to write would overwrite an input or another one, or is a folder."""
    taken = {path.resolve(): flag for flag, path in task.inputs if path is not None}
    for flag, path in [*table.paths(), *task.outputs]:
        if path is None:
            continue
        if path.resolve() in taken:
            raise CliError(f"{flag} {path} would overwrite {taken[path.resolve()]}")
        if not path.parent.is_dir():
            raise CliError(f"{flag}: there is no folder {path.parent}")
        if path.is_dir():
            raise CliError(f"{flag} {path} is a folder")
        taken[path.resolve()] = flag


def _complete(texts: TextFile, rows: RowFile, scorer: Scorer, report: RowReport, progress: Progress) -> None:
    """Complete the rows to one a text, batch by batch; the report gets all of them."""
    for batch in batches(texts):
        first = report.num_rows
        there = rows.read(len(batch))
        for record, item in zip(there, batch, strict=False):
            report.add(record, item, is_new=False)
        progress.move_to(report.num_rows)
        if len(there) == len(batch):
            continue
        records = scorer.score(batch, first, len(there), progress)
        for record, item in zip(records, batch[len(there) :], strict=True):
            rows.append(record)
            report.add(record, item, is_new=True)
            progress.move_to(report.num_rows)


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
