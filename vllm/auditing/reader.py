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
import resource
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vllm.auditing.other_servers import label_scorer
from vllm.auditing.readings import ERROR, EXIT_INTERRUPTED
from vllm.auditing.servers import AnyServer
from vllm.auditing.text_task import TextTask
from vllm.exceptions import CliError, VLLMValidationError
from vllm.scoring.decide.task import DecideTask
from vllm.scoring.files import write_atomically
from vllm.scoring.labels.task import LabelTask
from vllm.scoring.pooled.task import EmbedTask, RerankTask
from vllm.scoring.report import RowReport, Timing
from vllm.scoring.run import complete_file
from vllm.scoring.task import Task
from vllm.utils.server_client import ServerError

if TYPE_CHECKING:
    from vllm.entrypoints.llm import LLM


class AuditedLabelTask(LabelTask):
    """Reads labels from servers of others, too."""

    def __init__(self, args: argparse.Namespace) -> None:
        super().__init__(args)
        self._known: list[list[int]] = args.known_label_ids or []

    def server_scorer(self, server: Any) -> Any:
        """See Task."""
        return label_scorer(server, self.template, self.given, self.input_name, self._known)


KINDS: dict[str, type[Task]] = {
    "labels": AuditedLabelTask, "questions": DecideTask, "rerank": RerankTask, "embed": EmbedTask, "text": TextTask,
}  # fmt: skip

_PR_SET_PDEATHSIG = 1


def cost_path(rows: Path) -> Path:
    """The file with the cost of readings."""
    return rows.with_name(f"{rows.name}.cost.json")


def audited(kind: type[Task], adapter: str | None, is_server: bool = False) -> type[Task]:
    """The kind whose rows are counted alone, and whose engine has the adapter of a folder."""

    class Audited(kind):  # type: ignore[misc, valid-type]
        server_kind = AnyServer

        def engine_scorer(self, llm: LLM) -> Any:
            return super().engine_scorer(llm if adapter is None else _Adapted(llm, adapter))  # type: ignore[arg-type]

        def report(self, scorer: Any) -> RowReport:
            return _Cost(self.command, self.input_name, scorer, is_server)

    return Audited


class _Cost(RowReport):
    """Writes what the rows cost: seconds of scoring, of loading, and the most memory that the process had; a server's
    is not known."""

    def __init__(self, command: str, input_name: str, scorer: Any, is_server: bool) -> None:
        super().__init__(command, input_name)
        self._is_server = is_server
        self._labels = getattr(scorer, "labels", None)

    def print_rows(self) -> None:
        """No row is shown."""

    def print_failures(self, which: str) -> bool:
        """A row that cannot be read is counted by the audit."""
        return False

    def conclude(self, output: Path, model_name: str, timing: Timing, quiet: bool) -> None:
        peak = None if self._is_server else _peak_mib()
        found: dict[str, Any] = {"num_rows": self.num_rows, "num_failed": self.num_failed, "failure": self.failure}
        if self.num_new:
            # Rows of an earlier, killed run took as long.
            seconds = timing.scoring * self.num_rows / self.num_new
            found |= {"seconds": seconds, "loading_seconds": timing.loading, "peak_mib": peak}
        if self._labels is not None:
            found |= {"label_texts": self._labels.texts, "label_token_ids": self._labels.token_ids}
        write_atomically(cost_path(output), f"{json.dumps(found, ensure_ascii=False)}\n".encode())


def _peak_mib() -> float:
    """The most memory that this process has had. A new program's own, as rusage may count its parent's."""
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
        return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM")) / 1024
    except (OSError, StopIteration):
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


class _Adapted:
    """An engine whose requests all name one adapter."""

    def __init__(self, llm: LLM, folder: str) -> None:
        from vllm.lora.request import LoRARequest

        self._llm, self._lora = llm, LoRARequest(Path(folder).name, 1, folder)

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._llm, name)
        takes = ("score_labels", "generate", "decide_plans", "encode")
        return partial(value, lora_request=self._lora) if name in takes else value


def _read_on_ray(args: argparse.Namespace, kind: type[Task]) -> None:
    """Rows of engines on a cluster, whose memory is not known here."""
    began = time.perf_counter()
    complete_file(args, kind)
    failures = [row["error"] for path in sorted(args.output.glob("part-*.jsonl")) for row in _json_lines(path)]
    faults = [failure for failure in failures if failure is not None]
    found = {"num_rows": len(failures), "num_failed": len(faults), "failure": faults[0] if faults else None}
    found["seconds"] = time.perf_counter() - began
    write_atomically(cost_path(args.output), json.dumps(found).encode())


def _json_lines(path: Path) -> Iterator[dict[str, Any]]:
    with path.open(encoding="utf-8", newline="\n") as lines:
        for line in lines:
            yield {"error": None, **json.loads(line)}


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
            complete_file(args, audited(kind, args.adapter, args.url is not None))
    except (CliError, VLLMValidationError) as error:
        what = ""
        if (
            args.url is not None
            and args.kind != "labels"
            and isinstance(error, ServerError)
            and error.status in (404, 405)
        ):
            what = f"; {args.kind} are read from servers of this package alone, from others --labels"
        print(f"{ERROR}{' '.join(str(error).splitlines())}{what}")
        return 2
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    return 0


if __name__ == "__main__":
    sys.exit(main())
