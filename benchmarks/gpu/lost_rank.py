"""A row of the table: how long an engine of two devices takes to say that one has lost its process."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path

from vllm import LLM
from vllm.exceptions import EngineDeadError

_SECONDS_OF_WORK = 2.0


def measure(make_engine: Callable[[], LLM], generate: Callable[[LLM], object]) -> float:
    """Seconds from the end of rank 1's process, in the middle of `generate`, to the error.

    Raises:
        AssertionError: there was none.
    """
    before = _children()
    llm = make_engine()
    (rank_1,) = _children() - before
    killed: list[float] = []

    def kill() -> None:
        time.sleep(_SECONDS_OF_WORK)
        killed.append(time.perf_counter())
        os.kill(rank_1, signal.SIGKILL)

    killer = threading.Thread(target=kill)
    killer.start()
    try:
        while not killed or time.perf_counter() < killed[0] + 60:
            generate(llm)
    except EngineDeadError:
        return time.perf_counter() - killed[0]
    finally:
        killer.join()
    raise AssertionError("the engine works on without a rank")


def _children() -> set[int]:
    return {int(pid) for path in Path("/proc/self/task").glob("*/children") for pid in path.read_text().split()}
