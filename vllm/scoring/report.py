"""What `vllm score` tells at its end: table, picture, accuracy, throughput, failures."""

from __future__ import annotations

import shutil
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from vllm.scoring.files import Item, write_atomically
from vllm.scoring.labels import Labels, verdict
from vllm.scoring.plot import draw
from vllm.scoring.table import MAX_ROWS, format_table


@dataclass
class Report:
    """Counts over all rows, and the few of them that are shown.

    Attributes:
        labels: as they were scored.
        num_rows: rows in the output.
        num_scored: those without an error.
        num_new: those that this run computed.
        num_new_tokens: their prompts' tokens.
    """

    labels: Labels
    num_rows: int = 0
    num_scored: int = 0
    num_new: int = 0
    num_new_tokens: int = 0
    _num_judged: int = 0
    _num_correct: int = 0
    _first_failure: tuple[Item, str] | None = None
    _shown: list[tuple[dict[str, Any], bool | None]] = field(default_factory=list)
    _drawn: list[tuple[dict[str, Any], bool | None]] = field(default_factory=list)

    def add(self, record: dict[str, Any], item: Item, is_new: bool) -> None:
        """Take in the next row: its line of the output, its text, whether it was computed by this run."""
        correct = verdict(record, item, self.labels)
        self.num_rows += 1
        self._num_judged += correct is not None
        self._num_correct += correct is True
        if is_new:
            self.num_new += 1
            self.num_new_tokens += record["num_prompt_tokens"] or 0
        if len(self._shown) < MAX_ROWS:
            self._shown.append((record, correct))
        if "error" in record:
            self._first_failure = self._first_failure or (item, record["error"])
            return
        self.num_scored += 1
        if len(self._drawn) < MAX_ROWS:
            self._drawn.append((record, correct))

    def print_table(self) -> None:
        """Print the first rows."""
        width = shutil.get_terminal_size((120, 24)).columns
        records, correct = zip(*self._shown, strict=True)
        print(
            format_table(records, self.labels.names, self.labels.headings(), correct, width, self.num_rows), end="\n\n"
        )

    def draw(self, picture: Path, title: str) -> bool:
        """Draw the first rows; whether it could be done."""
        if not self._drawn:
            return False
        headings = dict(zip(self.labels.names, self.labels.headings(), strict=True))
        try:
            image = draw(self._drawn, headings, title, picture.suffix.lower().lstrip("."), self.num_scored)
        except ImportError:
            print("no picture: matplotlib is not installed (pip install matplotlib)", file=sys.stderr)
            return False
        write_atomically(picture, image)
        return True

    def print_summary(self, load_seconds: float, score_seconds: float) -> None:
        """Print accuracy and throughput."""
        if self._num_judged:
            share = self._num_correct / self._num_judged
            print(f"accuracy:   {self._num_correct} of {self._num_judged} ({share:.1%})")
        if self.num_new < self.num_rows:
            print(f"resumed:    {self.num_rows - self.num_new} of {self.num_rows} rows were there")
        if self.num_new:
            print(
                f"throughput: {self.num_new / score_seconds:.1f} prompts/s, "
                f"{self.num_new_tokens / score_seconds:.0f} prompt tokens/s ({self.num_new} prompts, "
                f"{self.num_new_tokens} tokens, in {score_seconds:.2f} s; loading took {load_seconds:.2f} s)"
            )

    def print_failures(self, input_name: str) -> bool:
        """Say on stderr how many rows have an error; whether any has."""
        if self._first_failure is None:
            return False
        item, error = self._first_failure
        print(
            f"vllm score: {self.num_rows - self.num_scored} of {self.num_rows} texts failed, "
            f"first {input_name}:{item.line}: {error}",
            file=sys.stderr,
        )
        return True
