"""A command with --backend ray: a file's texts, scored by engines on a Ray cluster.

This process reads the file and writes the output. One engine scores a batch, which is one file of the output. The rows
are those of the command without Ray, as they depend on their batch alone.
"""

from __future__ import annotations

import argparse
import os
import pickle
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import ray

from vllm.engine.arg_utils import EngineArgs
from vllm.exceptions import CliError
from vllm.scoring import batches as score_batches
from vllm.scoring.batches import Progress, batches, deciding
from vllm.scoring.columns import Columns, FieldKinds, failures
from vllm.scoring.files import Item, TextFile
from vllm.scoring.ray_engines import Batch, EnginesLostError, RayEngines, last_line
from vllm.scoring.report import Totals
from vllm.scoring.rows import PartFolder, check_output
from vllm.scoring.scorers import EngineScorer
from vllm.scoring.task import Task
from vllm.utils.ray_utils import call_within, connect

if TYPE_CHECKING:
    from vllm.entrypoints.llm import LLM

_LEAVE_SECONDS = 10.0  # what failed is told thereafter, and before Ray ends the process


def complete_on_ray(args: argparse.Namespace, kind: type[Task]) -> int:
    """Complete the output folder to one row a text; 0, or 1 when some of the texts failed."""
    if not args.file.is_file():
        raise CliError(f"--backend ray: {args.file} is not a file; it is read by another process than this one")
    task, kinds = kind(args), FieldKinds()
    texts, made_from = task.read_texts(args, kinds)
    output, form, batch_rows = task.output, args.output_format or "jsonl", score_batches.BATCH_ROWS
    made_from |= {**deciding(args, task.more_deciding), "output_format": form, "batch_rows": batch_rows}
    if not output.parent.is_dir():
        raise CliError(f"--output: there is no folder {output.parent}")
    if output.exists() and not output.is_dir():
        raise CliError(f"--output {output} is a file; with --backend ray it is a folder, with a file for each batch")
    check_output(output, made_from, args.resume, args.overwrite)
    job = _BatchJob(task, EngineArgs.from_cli_args(args), form, kinds, batch_rows)
    num_texts, totals = made_from["num_texts"], Totals(task.command)
    started = time.perf_counter()
    bar = closing(Progress(num_texts, shown=not args.quiet))
    with bar as progress, PartFolder(output, form, made_from, args.resume) as parts:
        for part, path in parts.parts().items():
            _count_old(totals, path, part * batch_rows)
        progress.move_to(totals.num_rows)
        if totals.num_rows < num_texts:
            with _cluster(args), _giving_up(output, totals, num_texts), _engines(job, args) as engines:
                for result in engines.results(_unscored(texts, batch_rows, frozenset(parts.parts()))):
                    parts.write(result.part, result.content)
                    num_rows = min(batch_rows, num_texts - result.part * batch_rows)
                    totals.count(num_rows, result.num_failed, result.failure, result.num_tokens)
                    progress.move_to(totals.num_rows)
    if not args.quiet:
        print(f"results:    {output}")
        totals.print_throughput(time.perf_counter() - started, " with starting and loading")
    return 1 if totals.print_failures("one of them") else 0


def _count_old(totals: Totals, part: Path, first_row: int) -> None:
    try:
        errors = list(failures(part))
    except (OSError, ValueError, KeyError, AttributeError) as error:
        raise CliError(f"{part}: not a part of this output ({error}); --overwrite starts anew") from None
    failed = [f"row {row}: {reason}" for row, reason in enumerate(errors, first_row) if reason]
    totals.count(len(errors), len(failed), failed[0] if failed else None, None)


@dataclass(frozen=True)
class _Result:
    """The result of a batch."""

    part: int
    content: bytes  # of the part file
    num_tokens: int  # of the prompts
    num_failed: int
    failure: str | None  # the first error, and where


@dataclass(frozen=True)
class _BatchJob:
    """See FileJob."""

    task: Task
    engine_args: EngineArgs
    form: str
    kinds: FieldKinds
    batch_rows: int

    def make_scorer(self, llm: LLM) -> EngineScorer:
        """See FileJob."""
        return self.task.engine_scorer(llm)

    def score(self, scorer: EngineScorer, part: int, items: bytes) -> _Result:
        """See FileJob."""
        batch: list[Item] = pickle.loads(items)
        records = list(scorer.score(batch, part * self.batch_rows, 0, Progress(len(batch), shown=False)))
        failed = [(item, record["error"]) for item, record in zip(batch, records, strict=True) if "error" in record]
        columns = Columns(self.kinds, self.task.schema(scorer), self.task.spread)
        return _Result(
            part=part,
            content=columns.encode(records, self.form),
            num_tokens=sum(record["num_prompt_tokens"] or 0 for record in records),
            num_failed=len(failed),
            failure=f"{self.task.input_name}:{failed[0][0].line}: {failed[0][1]}" if failed else None,
        )


def _unscored(texts: TextFile, batch_rows: int, done: frozenset[int]) -> Iterator[Batch]:
    """The batches of the file that are not done."""
    for part, items in enumerate(batches(texts, batch_rows)):
        if part not in done:
            yield part, pickle.dumps(items)


def _engines(job: _BatchJob, args: argparse.Namespace) -> RayEngines:
    try:
        return RayEngines(job, args.replicas or 1, args.replica_cpus)
    except ValueError as error:
        raise CliError(f"--replicas: {error}") from None


@contextmanager
def _giving_up(output: Path, totals: Totals, num_texts: int) -> Iterator[None]:
    """Say what is left when the cluster fails."""
    try:
        yield
    except (ray.exceptions.RayError, EnginesLostError) as error:
        there = f"{totals.num_rows} of {num_texts} rows are in {output}, --resume continues it"
        raise CliError(f"the Ray cluster gave up: {last_line(error)}; {there}") from error


@contextmanager
def _cluster(args: argparse.Namespace) -> Iterator[None]:
    """A connection to the cluster that the arguments name, or this process's own."""
    if not args.debug:
        # Ray would warn that arguments end with this process.
        os.environ.setdefault("RAY_BACKEND_LOG_LEVEL", "fatal")
    try:
        is_ours = connect(args.ray_address, log_to_driver=args.debug)
    except ConnectionError as error:
        raise CliError(f"--ray-address: {error}") from None
    try:
        yield
    finally:
        if is_ours:
            call_within(_LEAVE_SECONDS, ray.shutdown)
