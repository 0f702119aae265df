"""The process and its surroundings."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from vllm.logger import init_logger
from vllm.upstream.env_table import environment_variables

logger = init_logger(__name__)


def update_environment_variables(envs_dict: dict[str, str]) -> None:
    """Set environment variables; one that changes is a warning."""
    for name, value in envs_dict.items():
        if name in os.environ and os.environ[name] != value:
            logger.warning("%s was %r and is set to %r", name, os.environ[name], value)
        os.environ[name] = value


@contextlib.contextmanager
def set_env_var(key: str, value: str) -> Iterator[None]:
    """A variable set within, and as it was after."""
    before = os.environ.get(key)
    os.environ[key] = value
    try:
        yield
    finally:
        if before is None:
            os.environ.pop(key, None)
        else:
            os.environ[key] = before


@contextlib.contextmanager
def suppress_stdout() -> Iterator[None]:
    """Drop all that the process and its libraries print within."""
    sys.stdout.flush()
    kept = os.dup(1)
    try:
        with open(os.devnull, "wb") as nowhere:
            os.dup2(nowhere.fileno(), 1)
        yield
        sys.stdout.flush()
    finally:
        os.dup2(kept, 1)
        os.close(kept)


def unique_filepath(fn: Callable[[int], Path]) -> Path:
    """The first of fn(0), fn(1) ... that is not there."""
    index = 0
    while (path := fn(index)).exists():
        index += 1
    return path


def set_ulimit(target_soft_limit: int = 65535) -> None:
    """Let the process open more files, as far as it may."""
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = target_soft_limit if hard == resource.RLIM_INFINITY else min(target_soft_limit, hard)
    if soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def get_mp_context() -> Any:
    """multiprocessing, starting processes as VLLM_WORKER_MULTIPROC_METHOD says."""
    return multiprocessing.get_context(environment_variables["VLLM_WORKER_MULTIPROC_METHOD"]())


def kill_process_tree(pid: int) -> None:
    """Kill a process and its descendants. Needs psutil."""
    import psutil

    with contextlib.suppress(psutil.NoSuchProcess):
        process = psutil.Process(pid)
        for each in [*process.children(recursive=True), process]:
            with contextlib.suppress(psutil.NoSuchProcess):
                each.kill()


def decorate_logs(process_name: str | None = None) -> None:
    """Nothing: lines of the log name their process already."""
