"""`vllm score --backend ray` and `vllm decide --backend ray`: a file's texts, scored by engines on a Ray cluster.

This process reads the file and writes the output. A row of Ray Data's stream is a batch, which one engine scores and
which is one file of the output. The rows are those of `vllm score` without Ray, as they depend on their batch alone.
"""

from __future__ import annotations

import argparse
import logging
import os
import pickle
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import ray
import ray.data

from vllm.engine.arg_utils import EngineArgs
from vllm.exceptions import CliError
from vllm.scoring import batches as score_batches
from vllm.scoring.batches import BatchScorer, LocalScorer, Progress, batches, deciding
from vllm.scoring.columns import FieldKinds, failures
from vllm.scoring.dataset import Job
from vllm.scoring.files import Item, TextFile
from vllm.scoring.report import Totals
from vllm.scoring.rows import PartFolder, check_output
from vllm.scoring.run import read_input
from vllm.utils.ray_utils import connect

if TYPE_CHECKING:
    from vllm.entrypoints.llm import LLM

# A batch's part file, its prompts' tokens, its rows with an error and the first error; or only the reason why these
# arguments cannot be used.
_RESULT = pa.schema({
    "part": pa.int64(), "content": pa.large_binary(), "num_tokens": pa.int64(), "num_failed": pa.int64(),
    "failure": pa.string(), "refusal": pa.string(),
})  # fmt: skip


def score_file_on_ray(args: argparse.Namespace) -> int:
    """Complete the output folder to one row a text; 0, or 1 when some of the texts could not be scored."""
    check_file(args)
    kinds = FieldKinds()
    texts, template, made_from = read_input(args, kinds.add)
    make = partial(BatchScorer, template=template, given=args.labels or args.label_ids, input_name=texts.name)
    output = args.output or Path(f"{args.file.stem}.scores")
    return run_on_ray(args, texts.name, kinds, made_from, output, make, Totals())


def check_file(args: argparse.Namespace) -> None:
    """A CliError for what only this process can read."""
    if not args.file.is_file():
        raise CliError(f"--backend ray: {args.file} is not a file; it is read by another process than this one")


def run_on_ray(
    args: argparse.Namespace,
    input_name: str,
    kinds: FieldKinds,
    made_from: dict[str, Any],
    output: Path,
    make_scorer: Callable[[LLM], LocalScorer],
    totals: Totals,
) -> int:
    """Complete the folder `output` to one row a text, by scorers on the cluster; the exit code."""
    num_texts, form, batch_rows = made_from["num_texts"], args.output_format or "jsonl", score_batches.BATCH_ROWS
    made_from |= {**deciding(args), "output_format": form, "batch_rows": batch_rows}
    if not output.parent.is_dir():
        raise CliError(f"--output: there is no folder {output.parent}")
    if output.exists() and not output.is_dir():
        raise CliError(f"--output {output} is a file; with --backend ray it is a folder, with a file for each batch")
    check_output(output, made_from, args.resume, args.overwrite)
    engine_args = EngineArgs.from_cli_args(args)
    job = _FileJob(make_scorer, engine_args, args.replicas or 1, args.replica_cpus, input_name, form, kinds, batch_rows)
    started = time.perf_counter()
    bar = closing(Progress(num_texts, shown=not args.quiet))
    with bar as progress, PartFolder(output, form, made_from, args.resume) as parts:
        for part, path in parts.parts().items():
            _count_old(totals, path, part * batch_rows)
        progress.move_to(totals.num_rows)
        if totals.num_rows < num_texts:
            with _cluster(args):
                for result in _results(job, args, frozenset(parts.parts())):
                    parts.write(result["part"], result["content"])
                    num_rows = min(batch_rows, num_texts - result["part"] * batch_rows)
                    totals.count(num_rows, result["num_failed"], result["failure"], result["num_tokens"])
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
class _FileJob(Job):
    input_name: str  # for messages
    form: str
    kinds: FieldKinds
    batch_rows: int

    def score(self, scorer: LocalScorer, block: pa.Table) -> pa.Table:
        return pa.Table.from_pylist([self._score(scorer, **row) for row in block.to_pylist()], _RESULT)

    def refused(self, reason: str) -> pa.Table:
        # As an exception it would come with a traceback through Ray.
        return pa.Table.from_pylist([{"refusal": reason}], _RESULT)

    def _score(self, scorer: LocalScorer, part: int, items: bytes) -> dict[str, Any]:
        batch: list[Item] = pickle.loads(items)
        records = list(scorer.score(batch, part * self.batch_rows, 0, Progress(len(batch), shown=False)))
        failed = [(item, record["error"]) for item, record in zip(batch, records, strict=True) if "error" in record]
        return {
            "part": part,
            "content": scorer.columns(self.kinds).encode(records, self.form),
            "num_tokens": sum(record["num_prompt_tokens"] or 0 for record in records),
            "num_failed": len(failed),
            "failure": f"{self.input_name}:{failed[0][0].line}: {failed[0][1]}" if failed else None,
        }


def _results(job: _FileJob, args: argparse.Namespace, done: frozenset[int]) -> Iterator[dict[str, Any]]:
    """The results of the batches that are not done, each as soon as it is scored, in any order."""
    # One task reads the whole file, so that a batch is always the same; on this machine: others may not have the file.
    here = {"ray.io/node-id": ray.get_runtime_context().get_node_id()}
    file = (args.file.resolve(), args.text_field, args.limit, job.batch_rows, done)
    read: Any = _read
    stream = ray.data.from_items([0]).map_batches(
        read, fn_args=file, batch_size=None, batch_format="pyarrow", num_cpus=0, label_selector=here
    )
    try:
        stream = job.through_engines(stream, spare=0)
    except ValueError as error:
        raise CliError(f"--replicas: {error}") from None
    for result in stream.iter_rows():
        if result["refusal"]:
            raise CliError(result["refusal"])
        yield result


def _read(
    _: pa.Table, path: Path, text_field: str, limit: int | None, batch_rows: int, done: frozenset[int]
) -> Iterator[pa.Table]:
    """The batches of a file that are not done: part numbers and pickled items."""
    for part, items in enumerate(batches(TextFile(path, text_field, limit), batch_rows)):
        if part not in done:
            yield pa.table({"part": [part], "items": [pickle.dumps(items)]})


@contextmanager
def _cluster(args: argparse.Namespace) -> Iterator[None]:
    """A connection to the cluster that the arguments name, or this process's own."""
    context = ray.data.DataContext.get_current()
    before = (context.enable_progress_bars, context.target_max_block_size)
    # A row is a batch already: every one is a task of its own.
    context.enable_progress_bars, context.target_max_block_size = False, 1
    # Errors are reported in one line.
    logging.getLogger("ray.data").setLevel(logging.INFO if args.debug else logging.CRITICAL)
    if not args.debug:
        # Ray would warn that arguments end with this process.
        os.environ.setdefault("RAY_BACKEND_LOG_LEVEL", "fatal")
    try:
        is_ours = connect(args.ray_address, log_to_driver=args.debug)
    except ConnectionError as error:
        raise CliError(f"--ray-address: {error}") from None
    try:
        yield
    except ray.exceptions.RayError as error:
        reason = str(error).strip().splitlines()[-1]
        raise CliError(f"the Ray cluster gave up: {reason}; what is written stays, --resume continues it") from error
    finally:
        context.enable_progress_bars, context.target_max_block_size = before
        if is_ours:
            ray.shutdown()
