"""`vllm score --backend ray`: a file's texts, scored by engines on a Ray cluster.

The process that was started reads the file and writes the output, so that neither need be where the engines are. Ray
Data carries the texts between: a row of its stream is a batch, what one engine scores at once and one file of the
output. What is in flight is bounded; a batch whose actor dies is scored again by another, and one that was scored
twice is written once. The rows are those of `vllm score` without Ray, as a batch decides its own rows alone.
"""

from __future__ import annotations

import argparse
import logging
import os
import pickle
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import ray
import ray.data

from vllm.engine.arg_utils import EngineArgs
from vllm.exceptions import CliError
from vllm.scoring import batches as score_batches
from vllm.scoring.batches import BatchScorer, Progress, batches
from vllm.scoring.columns import FieldKinds, encode_part, failures
from vllm.scoring.dataset import through_engines
from vllm.scoring.files import Item, TextFile
from vllm.scoring.parts import PartFolder
from vllm.scoring.rows import check_output
from vllm.scoring.templates import Template
from vllm.utils.ray_utils import connect, cpus_for_each

_LABEL = "vllm score"


@dataclass(frozen=True)
class FileJob:
    """What is to be scored.

    Attributes:
        args: the command line.
        texts: the file.
        template: of the prompts; None = the default one.
        made_from: what decides the rows, for OUTPUT.meta.json.
        kinds: what the file's fields hold.
    """

    args: argparse.Namespace
    texts: TextFile
    template: Template | None
    made_from: dict[str, Any]
    kinds: FieldKinds

    @property
    def form(self) -> str:
        """The parts' format."""
        return self.args.output_format or "jsonl"

    @property
    def replicas(self) -> int:
        """How many engines."""
        return self.args.replicas or 1

    @property
    def batch_rows(self) -> int:
        """Rows of a part, but for the last one."""
        return score_batches.BATCH_ROWS

    @property
    def num_texts(self) -> int:
        count: int = self.made_from["num_texts"]
        return count

    def num_rows(self, part: int) -> int:
        """Rows of a part."""
        return min(self.batch_rows, self.num_texts - part * self.batch_rows)

    def output(self) -> Path:
        """The folder of the parts.

        Raises:
            CliError: it cannot be one.
        """
        folder: Path = self.args.output or Path(f"{self.args.file.stem}.scores")
        if not folder.parent.is_dir():
            raise CliError(f"--output: there is no folder {folder.parent}")
        if folder.exists() and not folder.is_dir():
            raise CliError(
                f"--output {folder} is a file; with --backend ray it is a folder, with a file for each batch"
            )
        return folder


def score_file(job: FileJob) -> int:
    """Bring the output folder to one row a text.

    Returns:
        0, or 1 when some of the texts could not be scored.

    Raises:
        CliError: an argument, the model or the cluster cannot be used; or the cluster gave up.
    """
    args, output = job.args, job.output()
    made_from = {**job.made_from, "output_format": job.form, "batch_rows": job.batch_rows}
    check_output(output, made_from, args.resume, args.overwrite)
    totals = _Totals()
    progress = Progress(job.num_texts, shown=not args.quiet)
    started = time.perf_counter()
    try:
        with PartFolder(output, job.form, made_from, args.resume) as parts:
            for part, path in parts.parts().items():
                totals.add_old(path, part * job.batch_rows)
            progress.move_to(totals.num_rows)
            if totals.num_rows < job.num_texts:
                with _cluster(args), _errors_in_one_line():
                    for result in _results(job, frozenset(parts.parts())):
                        parts.write(result["part"], result["content"])
                        totals.add_new(result, job.num_rows(result["part"]))
                        progress.move_to(totals.num_rows)
    finally:
        progress.close()
    if not args.quiet:
        print(f"results:    {output}")
        totals.print_summary(time.perf_counter() - started)
    return 1 if totals.print_failures() else 0


def _results(job: FileJob, done: frozenset[int]) -> Iterator[dict[str, Any]]:
    """The batches without a part, each as soon as it is scored, in any order; see _Replica for what they hold."""
    args = job.args
    try:
        cpus = args.replica_cpus or cpus_for_each(job.replicas)
    except ValueError as error:
        raise CliError(f"--replicas: {error}") from None
    source = _TextSource(args.file.resolve(), args.text_field, args.limit, job.batch_rows, done)
    # On this machine, which may be the only one that has the file.
    here = {"ray.io/node-id": ray.get_runtime_context().get_node_id()}
    stream = ray.data.read_datasource(source, override_num_blocks=1, num_cpus=0, label_selector=here)
    engine_args = EngineArgs.from_cli_args(args)
    replica = (engine_args, args.labels or args.label_ids, job.template, job.texts.name, job.form, job.kinds)
    stream = through_engines(stream, _Replica, (*replica, job.batch_rows), engine_args, job.replicas, cpus)
    for result in stream.iter_rows():
        if result["refusal"]:
            raise CliError(result["refusal"])
        yield result


class _TextSource(ray.data.Datasource):
    """Batches of a file's items: the number of each one's part, and the items. One task reads the file from its
    beginning to its end, so that a batch is the same however often it is read."""

    def __init__(self, path: Path, text_field: str, limit: int | None, batch_rows: int, done: frozenset[int]) -> None:
        """
        Args:
            path, text_field, limit: see TextFile.
            batch_rows: items of a batch.
            done: the parts to leave out.
        """
        super().__init__()
        self._file = (path, text_field, limit)
        self._batch_rows, self._done = batch_rows, done

    def estimate_inmemory_data_size(self) -> int | None:
        return None

    def get_read_tasks(self, parallelism: int, *_: Any, **__: Any) -> list[ray.data.ReadTask]:
        metadata = ray.data.block.BlockMetadata(num_rows=None, size_bytes=None, input_files=None, exec_stats=None)
        return [ray.data.ReadTask(self._read, metadata)]

    def _read(self) -> Iterable[pa.Table]:
        for part, items in enumerate(batches(TextFile(*self._file), self._batch_rows)):
            if part not in self._done:
                yield pa.table({"part": [part], "items": [pickle.dumps(items)]})


class _Replica:
    """An actor that holds an engine. Its results: `part`; `content`, the part's file; `num_tokens` of its prompts;
    `num_failed` rows and the `first_failure`; or a `refusal`: why this model scores nothing, as the arguments are."""

    def __init__(
        self,
        engine_args: EngineArgs,
        given: Sequence[str] | Sequence[int],
        template: Template | None,
        input_name: str,
        form: str,
        kinds: FieldKinds,
        batch_rows: int,
    ) -> None:
        from vllm.entrypoints.llm import LLM

        self._input_name, self._form, self._kinds, self._batch_rows = input_name, form, kinds, batch_rows
        self._refusal = ""
        try:
            self._scorer = BatchScorer.of(LLM(**vars(engine_args), use_tqdm_on_load=False), template, given, input_name)
        except (CliError, ValueError, OSError) as error:
            # Raised from here, it would come with a traceback through Ray.
            self._refusal = str(error)

    def __call__(self, stream: pa.Table) -> pa.Table:
        return pa.Table.from_pylist([self._score(row["part"], row["items"]) for row in stream.to_pylist()], _RESULT)

    def _score(self, part: int, pickled: bytes) -> dict[str, Any]:
        if self._refusal:
            return {"refusal": self._refusal}
        items: list[Item] = pickle.loads(pickled)
        records = list(self._scorer.score(items, part * self._batch_rows, 0, Progress(len(items), shown=False)))
        failed = [(item, record["error"]) for item, record in zip(items, records, strict=True) if "error" in record]
        return {
            "part": part,
            "content": encode_part(records, self._form, self._scorer.labels, self._kinds),
            "num_tokens": sum(record["num_prompt_tokens"] for record in records),
            "num_failed": len(failed),
            "first_failure": f"{self._input_name}:{failed[0][0].line}: {failed[0][1]}" if failed else None,
        }


_RESULT = pa.schema(
    {
        "part": pa.int64(),
        "content": pa.large_binary(),
        "num_tokens": pa.int64(),
        "num_failed": pa.int64(),
        "first_failure": pa.string(),
        "refusal": pa.string(),
    }
)


@dataclass
class _Totals:
    """Counts over all rows of the output."""

    num_rows: int = 0
    num_old: int = 0
    num_failed: int = 0
    num_new_tokens: int = 0
    first_failure: str | None = None

    def add_old(self, part: Path, first_row: int) -> None:
        """A part of an earlier run.

        Raises:
            CliError: it cannot be read.
        """
        try:
            errors = list(failures(part))
        except (OSError, ValueError, KeyError, AttributeError) as error:
            raise CliError(f"{part}: not a part of this output ({error}); --overwrite starts anew") from None
        self.num_rows += len(errors)
        self.num_old += len(errors)
        for row, reason in enumerate(errors, first_row):
            if reason:
                self.num_failed += 1
                self.first_failure = self.first_failure or f"row {row}: {reason}"

    def add_new(self, result: dict[str, Any], num_rows: int) -> None:
        """A batch that was scored now."""
        self.num_rows += num_rows
        self.num_new_tokens += result["num_tokens"]
        self.num_failed += result["num_failed"]
        self.first_failure = self.first_failure or result["first_failure"]

    def print_summary(self, seconds: float) -> None:
        num_new = self.num_rows - self.num_old
        if self.num_old:
            print(f"resumed:    {self.num_old} of {self.num_rows} rows were there")
        if num_new:
            print(
                f"throughput: {num_new / seconds:.1f} prompts/s, {self.num_new_tokens / seconds:.0f} prompt tokens/s "
                f"({num_new} prompts, {self.num_new_tokens} tokens, in {seconds:.2f} s with starting and loading)"
            )

    def print_failures(self) -> bool:
        """Say on stderr how many rows have an error; whether any has."""
        if self.num_failed:
            message = f"{self.num_failed} of {self.num_rows} texts failed, one of them {self.first_failure}"
            print(f"{_LABEL}: {message}", file=sys.stderr)
        return self.num_failed > 0


@contextmanager
def _cluster(args: argparse.Namespace) -> Iterator[None]:
    """A connection to the cluster that the arguments name, or the one that this process has."""
    context = ray.data.DataContext.get_current()
    before = (context.enable_progress_bars, context.target_max_block_size)
    # A row is a batch already: every one is a task of its own.
    context.enable_progress_bars, context.target_max_block_size = False, 1
    # What goes wrong is told in one line.
    logging.getLogger("ray.data").setLevel(logging.INFO if args.debug else logging.CRITICAL)
    if not args.debug:
        # It warns of arguments that would be lost with this process, and all is lost with this process.
        os.environ.setdefault("RAY_BACKEND_LOG_LEVEL", "fatal")
    try:
        is_ours = connect(args.ray_address, log_to_driver=args.debug)
    except ConnectionError as error:
        raise CliError(f"--ray-address: {error}") from None
    try:
        yield
    finally:
        context.enable_progress_bars, context.target_max_block_size = before
        if is_ours:
            ray.shutdown()


@contextmanager
def _errors_in_one_line() -> Iterator[None]:
    try:
        yield
    except ray.exceptions.RayError as error:
        reason = str(error).strip().splitlines()[-1]
        raise CliError(f"the Ray cluster gave up: {reason}; what is written stays, --resume continues it") from error
