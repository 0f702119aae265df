"""The end of a run over a file: counts, throughput and failures; kinds of rows show more."""

from __future__ import annotations

import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.cells import cell_len, set_cell_size

from vllm.scoring.files import Item, write_atomically

MAX_ROWS = 60
PICTURE_FORMATS = ("png", "svg", "pdf")
_HEADING_WIDTH = 16


@dataclass
class Totals:
    command: str
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
            print(f"vllm {self.command}: {message}", file=sys.stderr)
        return self.num_failed > 0


@dataclass(frozen=True)
class Timing:
    """Seconds of a run."""

    loading: float
    scoring: float


class RowReport(Totals, ABC):
    """Totals of rows that come one by one, and what is shown of them."""

    def __init__(self, command: str, input_name: str) -> None:
        super().__init__(command)
        self._input_name = input_name

    def add(self, record: dict[str, Any], item: Item, is_new: bool) -> None:
        """Count the next row: its line of the output, its text, whether this run computed it."""
        failure = f"{self._input_name}:{item.line}: {record['error']}" if "error" in record else None
        self.count(1, failure is not None, failure, (record["num_prompt_tokens"] or 0) if is_new else None)

    @abstractmethod
    def print_rows(self) -> None:
        """Print some of the rows."""

    def conclude(self, output: Path, model_name: str, timing: Timing, quiet: bool) -> None:
        """Print the results, unless `quiet`."""
        if not quiet:
            self.print_rows()
            self.print_results(output, timing)

    def print_results(self, output: Path, timing: Timing, *lines: str) -> None:
        """Print where they are, further `lines`, and the throughput."""
        print(f"results:    {output}", *lines, sep="\n")
        self.print_throughput(timing.scoring, f"; loading took {timing.loading:.2f} s")


def draw_picture(path: Path, draw: Callable[[str], bytes]) -> bool:
    """Write the picture that `draw` makes in the format of its suffix; False, and a word of it on stderr, without
    matplotlib."""
    try:
        image = draw(path.suffix.lower().lstrip("."))
    except ImportError:
        print("no picture: matplotlib is not installed (pip install matplotlib)", file=sys.stderr)
        return False
    write_atomically(path, image)
    return True


def short_names(names: Sequence[str]) -> list[str]:
    """Names as headings: without surrounding space where they stay distinct so, and cut when long."""
    stripped = [name.strip() for name in names]
    found = stripped if all(stripped) and len(set(stripped)) == len(names) else [repr(name) for name in names]
    return [cut(name, _HEADING_WIDTH) for name in found]


def one_line(text: str) -> str:
    """The text without line breaks and other control characters, which could steer a terminal."""
    return " ".join("".join(char if char.isprintable() else " " for char in text).split())


def cut(text: str, width: int) -> str:
    """The text on one line, in at most `width` columns of a terminal."""
    text = one_line(text)
    return text if cell_len(text) <= width else set_cell_size(text, width - 1).rstrip(" .,") + "…"
