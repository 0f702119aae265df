"""Batches of a file's texts, and a bar over all of them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Any

from vllm import envs
from vllm.scoring.files import Item, TextFile

BATCH_ROWS = 256

_DECIDING = (
    "model", "revision", "hf_overrides", "quantization", "dtype", "max_model_len",
    "tokenizer", "tokenizer_revision", "tokenizer_mode",
)  # fmt: skip


def deciding(args: object, more: Iterable[str] = ()) -> dict[str, Any]:
    """The engine arguments, `more` included, and environment variables that decide what is read. Others, such as the
    size of a step, change only speed and last bits, and a run that was killed for memory may need them changed."""
    return {name: getattr(args, name) for name in (*_DECIDING, *more)} | envs.arithmetic()


def batches(texts: TextFile, num_rows: int | None = None) -> Iterator[list[Item]]:
    """The file's items, `num_rows` (None: BATCH_ROWS) at a time."""
    items = iter(texts)
    while batch := list(islice(items, num_rows or BATCH_ROWS)):
        yield batch


class Progress:
    """A bar over all rows; while a batch is scored it moves by the share of its finished requests."""

    def __init__(self, num_rows: int, shown: bool) -> None:
        from tqdm import tqdm

        self._bar = tqdm(total=num_rows, desc="Scored texts", unit="text", dynamic_ncols=True, disable=not shown)

    def move_to(self, row: int) -> None:
        if row > self._bar.n:
            self._bar.update(row - self._bar.n)

    def of_batch(self, first_row: int, num_rows: int) -> bool | Callable[..., _BatchProgress]:
        """The engine's `use_tqdm` for these rows."""
        if self._bar.disable:
            return False
        return lambda total, **_: _BatchProgress(self, first_row, num_rows, total)

    def close(self) -> None:
        self._bar.close()


@dataclass
class _BatchProgress:
    """A batch's requests, in the shape of a tqdm bar."""

    progress: Progress
    first_row: int
    num_rows: int
    num_requests: int
    num_done: int = 0

    def update(self, count: int) -> None:
        self.num_done += count
        self.progress.move_to(self.first_row + self.num_done * self.num_rows // self.num_requests)

    def close(self) -> None:
        """The bar of all rows stays."""
