"""The kinds of readings: the tasks of the commands over files, whose rows are counted alone."""

from __future__ import annotations

import argparse
import json
import resource
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vllm.auditing.models import ModelSpec
from vllm.auditing.other_servers import KnownLabels, label_scorer
from vllm.auditing.served_texts import ServedTextScorer
from vllm.auditing.servers import AnyServer
from vllm.auditing.text_task import TextTask
from vllm.auditing.vocabularies import spec_tokenizer
from vllm.scoring.decide.task import DecideTask
from vllm.scoring.files import write_atomically
from vllm.scoring.labels.task import LabelTask
from vllm.scoring.pooled.task import EmbedTask, RerankTask
from vllm.scoring.report import RowReport, Timing
from vllm.scoring.task import Task

if TYPE_CHECKING:
    from vllm.entrypoints.llm import LLM


def cost_path(rows: Path) -> Path:
    """The file with the cost of readings."""
    return rows.with_name(f"{rows.name}.cost.json")


class _Audited(Task):
    """A kind whose engine may have the adapter of a folder."""

    server_kind = AnyServer

    def __init__(self, args: argparse.Namespace) -> None:
        super().__init__(args)
        self._adapter: str | None = args.adapter
        self._is_server = args.url is not None

    def engine_scorer(self, llm: LLM) -> Any:
        adapted: Any = llm if self._adapter is None else _Adapted(llm, self._adapter)
        return super().engine_scorer(adapted)  # type: ignore[safe-super]

    def report(self, scorer: Any) -> Any:
        return _Cost(self.command, self.input_name, scorer, self._is_server)


class AuditedLabels(_Audited, LabelTask):
    """Reads labels from servers of others, too."""

    def __init__(self, args: argparse.Namespace) -> None:
        super().__init__(args)
        self._known: KnownLabels = args.known_labels or ([], [])

    def server_scorer(self, server: Any) -> Any:
        """See Task."""
        return label_scorer(server, self.template, self.given, self.input_name, self._known)


class AuditedAnswers(_Audited, DecideTask):
    """Answers to questions."""


class AuditedDocuments(_Audited, RerankTask):
    """Scores of documents."""


class AuditedVectors(_Audited, EmbedTask):
    """Vectors."""


class AuditedTexts(_Audited, TextTask):
    """Positions of texts; of a candidate at a server, of anybody, those of the texts' own tokens."""

    def __init__(self, args: argparse.Namespace) -> None:
        super().__init__(args)
        self._reference_spec: ModelSpec | None = args.reference_spec

    def server_scorer(self, server: Any) -> Any:
        """See Task."""
        assert self._reference_spec is not None and self.reference is not None
        return ServedTextScorer(server, spec_tokenizer(self._reference_spec), self.chunk, self.reference)


KINDS: dict[str, type[Task]] = {
    "labels": AuditedLabels, "questions": AuditedAnswers, "rerank": AuditedDocuments, "embed": AuditedVectors,
    "text": AuditedTexts,
}  # fmt: skip


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
