"""Runs whose output is a folder of part files, each of a batch's rows: by an engine here, a server, or Ray."""

from __future__ import annotations

import argparse
import pickle
import time
from collections.abc import Iterator
from contextlib import closing, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from vllm.engine.arg_utils import EngineArgs
from vllm.exceptions import CliError
from vllm.scoring import batches as score_batches
from vllm.scoring.batches import Progress, batches, deciding
from vllm.scoring.columns import Columns, FieldKinds, failures
from vllm.scoring.files import Item, TextFile
from vllm.scoring.report import Totals
from vllm.scoring.rows import PartFolder, check_output
from vllm.scoring.scorers import Scorer
from vllm.scoring.task import Task

if TYPE_CHECKING:
    from collections.abc import Callable

    from vllm.entrypoints.llm import LLM


@dataclass(frozen=True)
class PartResult:
    """The result of a batch."""

    part: int
    content: bytes  # of the part file
    num_tokens: int  # of the prompts
    num_failed: int
    failure: str | None  # the first error, and where


@dataclass(frozen=True)
class PartJob:
    """From a batch of items to a part; picklable, a FileJob for `ray_engines`."""

    task: Task
    engine_args: EngineArgs
    form: str
    kinds: FieldKinds
    batch_rows: int

    def make_scorer(self, llm: LLM) -> Any:
        """See FileJob."""
        return self.task.engine_scorer(llm)

    def score(self, scorer: Scorer, part: int, items: bytes) -> PartResult:
        """See FileJob."""
        batch: list[Item] = pickle.loads(items)
        return self.scored(scorer, part, batch, Progress(len(batch), shown=False))

    def scored(self, scorer: Scorer, part: int, batch: list[Item], progress: Progress) -> PartResult:
        """The part of a batch."""
        records = list(scorer.score(batch, part * self.batch_rows, 0, progress))
        failed = [(item, record["error"]) for item, record in zip(batch, records, strict=True) if "error" in record]
        columns = Columns(self.kinds, self.task.schema(scorer), self.task.spread)
        return PartResult(
            part=part,
            content=columns.encode(records, self.form),
            num_tokens=sum(record["num_prompt_tokens"] or 0 for record in records),
            num_failed=len(failed),
            failure=f"{self.task.input_name}:{failed[0][0].line}: {failed[0][1]}" if failed else None,
        )


@dataclass
class PartRun:
    """A run's texts, folder and counts."""

    job: PartJob
    texts: TextFile
    made_from: dict[str, Any]
    totals: Totals

    @classmethod
    def of(cls, args: argparse.Namespace, task: Task) -> PartRun:
        """Reads the texts. CliError: they, or the output's name, cannot be used."""
        kinds = FieldKinds()
        texts, made_from = task.read_texts(args, kinds)
        form = args.output_format or task.part_form
        batch_rows = task.batch_rows or score_batches.BATCH_ROWS
        made_from |= {"output_format": form, "batch_rows": batch_rows}
        output = task.output
        if not output.parent.is_dir():
            raise CliError(f"--output: there is no folder {output.parent}")
        if output.exists() and not output.is_dir():
            raise CliError(f"--output {output} is a file; it is to be a folder, with a file for each batch")
        job = PartJob(task, EngineArgs.from_cli_args(args), form, kinds, batch_rows)
        return cls(job, texts, made_from, Totals(task.command))

    @property
    def num_texts(self) -> int:
        return int(self.made_from["num_texts"])

    def folder(self, args: argparse.Namespace) -> PartFolder:
        """The output; CliError: it is there, or made from something else."""
        output = self.job.task.output
        check_output(output, self.made_from, args.resume, args.overwrite)
        return PartFolder(output, self.job.form, self.made_from, args.resume)

    def count_old(self, parts: PartFolder) -> None:
        """Count the rows of the parts that are there."""
        for number, path in parts.parts().items():
            first_row = number * self.job.batch_rows
            try:
                errors = list(failures(path))
            except (OSError, ValueError, KeyError, AttributeError) as error:
                raise CliError(f"{path}: not a part of this output ({error}); --overwrite starts anew") from None
            failed = [f"row {row}: {reason}" for row, reason in enumerate(errors, first_row) if reason]
            self.totals.count(len(errors), len(failed), failed[0] if failed else None, None)

    def add(self, parts: PartFolder, result: PartResult) -> None:
        """Write a part and count its rows."""
        parts.write(result.part, result.content)
        num_rows = min(self.job.batch_rows, self.num_texts - result.part * self.job.batch_rows)
        self.totals.count(num_rows, result.num_failed, result.failure, result.num_tokens)

    def unscored(self, parts: PartFolder) -> Iterator[tuple[int, list[Item]]]:
        """The batches that have no part."""
        done = frozenset(parts.parts())
        for part, items in enumerate(batches(self.texts, self.job.batch_rows)):
            if part not in done:
                yield part, items

    def conclude(self, quiet: bool, seconds: float, remark: str, which: str) -> int:
        """Print what there is; the exit code, 1 where texts failed."""
        if not quiet:
            print(f"results:    {self.job.task.output}")
            self.totals.print_throughput(seconds, remark)
        return 1 if self.totals.print_failures(which) else 0


def complete_parts(args: argparse.Namespace, task: Task, load: Callable[[argparse.Namespace], LLM]) -> int:
    """Complete the output folder to one row a text, by an engine that `load` makes or by a server; 0, or 1 when some of
    the texts failed."""
    run = PartRun.of(args, task)
    with nullcontext() if args.url is None else task.server_kind(args) as server:
        run.made_from |= deciding(args, task.more_deciding) if server is None else server.deciding()
        bar = closing(Progress(run.num_texts, shown=not args.quiet))
        began = loaded = time.perf_counter()
        with bar as progress, run.folder(args) as parts:
            run.count_old(parts)
            progress.move_to(run.totals.num_rows)
            if run.totals.num_rows < run.num_texts:
                scorer = task.engine_scorer(load(args)) if server is None else task.server_scorer(server)
                loaded = time.perf_counter()
                for part, items in run.unscored(parts):
                    run.add(parts, run.job.scored(scorer, part, items, progress))
                    progress.move_to(run.totals.num_rows)
    remark = f"; loading took {loaded - began:.2f} s"
    return run.conclude(args.quiet, time.perf_counter() - loaded, remark, "first")
