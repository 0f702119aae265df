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

import ray

from vllm.exceptions import CliError
from vllm.scoring.batches import Progress, deciding
from vllm.scoring.part_files import PartJob, PartRun
from vllm.scoring.ray_engines import EnginesLostError, RayEngines, last_line
from vllm.scoring.task import Task
from vllm.utils.ray_utils import call_within, connect

_LEAVE_SECONDS = 10.0  # what failed is told thereafter, and before Ray ends the process


def complete_on_ray(args: argparse.Namespace, kind: type[Task]) -> int:
    """Complete the output folder to one row a text; 0, or 1 when some of the texts failed."""
    if not args.file.is_file():
        raise CliError(f"--backend ray: {args.file} is not a file; it is read by another process than this one")
    task = kind(args)
    run = PartRun.of(args, task)
    run.made_from |= deciding(args, task.more_deciding)
    started = time.perf_counter()
    bar = closing(Progress(run.num_texts, shown=not args.quiet))
    with bar as progress, run.folder(args) as parts:
        run.count_old(parts)
        progress.move_to(run.totals.num_rows)
        if run.totals.num_rows < run.num_texts:
            unscored = ((part, pickle.dumps(items)) for part, items in run.unscored(parts))
            with _cluster(args), _giving_up(run), _engines(run.job, args) as engines:
                for result in engines.results(unscored):
                    run.add(parts, result)
                    progress.move_to(run.totals.num_rows)
    return run.conclude(args.quiet, time.perf_counter() - started, " with starting and loading", "one of them")


def _engines(job: PartJob, args: argparse.Namespace) -> RayEngines:
    try:
        return RayEngines(job, args.replicas or 1, args.replica_cpus)
    except ValueError as error:
        raise CliError(f"--replicas: {error}") from None


@contextmanager
def _giving_up(run: PartRun) -> Iterator[None]:
    """Say what is left when the cluster fails."""
    try:
        yield
    except (ray.exceptions.RayError, EnginesLostError) as error:
        output = run.job.task.output
        there = f"{run.totals.num_rows} of {run.num_texts} rows are in {output}, --resume continues it"
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
