"""A model's readings of all rows, in a process of its own, so that one model is in memory at a time.

`python -m vllm.auditing.reader` gets a pickled namespace on standard input, writes the rows as the commands over files
do, and their cost beside them.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import pickle
import signal
import sys
import time
from contextlib import suppress
from typing import Any

from vllm.auditing.readings import ERROR, EXIT_INTERRUPTED
from vllm.auditing.tasks import KINDS, cost_path
from vllm.exceptions import CliError, VLLMValidationError
from vllm.scoring.files import write_atomically
from vllm.scoring.run import complete_file
from vllm.scoring.task import Task
from vllm.utils.server_client import ServerError

_PR_SET_PDEATHSIG = 1


def _read_on_ray(args: argparse.Namespace, kind: type[Task]) -> None:
    """Rows of engines on a cluster, whose memory is not known here."""
    began = time.perf_counter()
    complete_file(args, kind)
    found: dict[str, Any] = {"num_rows": 0, "num_failed": 0, "failure": None}
    for path in sorted(args.output.glob("part-*.jsonl")):
        with path.open(encoding="utf-8", newline="\n") as lines:
            for line in lines:
                error = json.loads(line).get("error")
                found["num_rows"] += 1
                found["num_failed"] += error is not None
                found["failure"] = found["failure"] or error
    found["seconds"] = time.perf_counter() - began
    write_atomically(cost_path(args.output), json.dumps(found).encode())


def _end_with(parent: int) -> None:
    """End when the audit does, however it is ended: a reader without it would hold the lock of its rows."""
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != parent:
        sys.exit(EXIT_INTERRUPTED)


def main() -> int:
    """Read the rows; 2 for bad values, which the last line of standard output names, 1 for another fault."""
    args: argparse.Namespace = pickle.load(sys.stdin.buffer)
    _end_with(args.parent)
    kind = KINDS[args.kind]
    try:
        if args.backend is not None:
            _read_on_ray(args, kind)
        else:
            complete_file(args, kind)
    except (CliError, VLLMValidationError) as error:
        what = ""
        if (
            args.url is not None
            and args.kind not in ("labels", "text")
            and isinstance(error, ServerError)
            and error.status in (404, 405)
        ):
            what = f"; {args.kind} are read from servers of this package alone, from others --labels and texts"
        print(f"{ERROR}{' '.join(str(error).splitlines())}{what}")
        return 2
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    return 0


if __name__ == "__main__":
    sys.exit(main())
