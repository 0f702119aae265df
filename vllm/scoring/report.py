"""What `vllm score` prints at its end: table, picture, accuracy, throughput, failures."""

from __future__ import annotations

import shutil
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vllm.scoring.files import Item, write_atomically
from vllm.scoring.labels import Labels, verdict
from vllm.scoring.plot import draw
from vllm.scoring.table import MAX_ROWS, format_table


@dataclass
class Totals:
    """Counts over all rows of the output."""

    num_rows: int = 0
    num_new: int = 0  # computed by this run
    num_new_tokens: int = 0  # of their prompts
    num_failed: int = 0
    failure: str | None = None  # the first error, and where

    def count(self, num_rows: int, num_failed: int, failure: str | None, num_new_tokens: int | None) -> None:
        """Add rows; `num_new_tokens` is None for those of an earlier run."""
        self.num_rows += num_rows
        if num_new_tokens is not None:
            self.num_new += num_rows
            self.num_new_tokens += num_new_tokens
        self.num_failed += num_failed
        self.failure = self.failure or failure

    def print_throughput(self, seconds: float, remark: str) -> None:
        """Print the number of new rows and their rate; `remark` follows the seconds."""
        if self.num_new < self.num_rows:
            print(f"resumed:    {self.num_rows - self.num_new} of {self.num_rows} rows were there")
        if self.num_new:
            print(
                f"throughput: {self.num_new / seconds:.1f} prompts/s, {self.num_new_tokens / seconds:.0f} prompt "
                f"tokens/s ({self.num_new} prompts, {self.num_new_tokens} tokens, in {seconds:.2f} s{remark})"
            )

    def print_failures(self, which: str) -> bool:
        """Print the number of errors and one of them (`which` one) to stderr; whether there are any."""
        if self.num_failed:
            message = f"{self.num_failed} of {self.num_rows} texts failed, {which} {self.failure}"
            print(f"vllm score: {message}", file=sys.stderr)
        return self.num_failed > 0


class Report(Totals):
    """Counts, and the first rows to be shown."""

    def __init__(self, labels: Labels, input_name: str) -> None:
        super().__init__()
        self._labels, self._input_name = labels, input_name
        self._num_judged = self._num_correct = 0
        self._shown: list[tuple[dict[str, Any], bool | None]] = []
        self._drawn: list[tuple[dict[str, Any], bool | None]] = []

    def add(self, record: dict[str, Any], item: Item, is_new: bool) -> None:
        """Add the next row: its line of the output, its text, whether this run computed it."""
        correct = verdict(record, item, self._labels)
        failure = f"{self._input_name}:{item.line}: {record['error']}" if "error" in record else None
        self.count(1, failure is not None, failure, (record["num_prompt_tokens"] or 0) if is_new else None)
        self._num_judged += correct is not None
        self._num_correct += correct is True
        if len(self._shown) < MAX_ROWS:
            self._shown.append((record, correct))
        if failure is None and len(self._drawn) < MAX_ROWS:
            self._drawn.append((record, correct))

    def print_table(self) -> None:
        width = shutil.get_terminal_size((120, 24)).columns
        print(format_table(self._shown, self._labels.headings(), width, self.num_rows), end="\n\n")

    def draw(self, picture: Path, title: str) -> bool:
        """Draw the first rows without an error; whether that was possible."""
        if not self._drawn:
            return False
        image_format, num_scored = picture.suffix.lower().lstrip("."), self.num_rows - self.num_failed
        try:
            image = draw(self._drawn, self._labels.headings(), title, image_format, num_scored)
        except ImportError:
            print("no picture: matplotlib is not installed (pip install matplotlib)", file=sys.stderr)
            return False
        write_atomically(picture, image)
        return True

    def print_summary(self, load_seconds: float, score_seconds: float) -> None:
        if self._num_judged:
            share = self._num_correct / self._num_judged
            print(f"accuracy:   {self._num_correct} of {self._num_judged} ({share:.1%})")
        self.print_throughput(score_seconds, f"; loading took {load_seconds:.2f} s")
