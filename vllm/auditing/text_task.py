"""Readings of whole texts over the whole vocabulary.

The reference's logprobs of every position are kept in a file, float32 [positions, vocabulary]; a candidate is compared
with them position by position, so that neither's are in memory at once. The reference's token ids are read by all.
"""

from __future__ import annotations

import argparse
import json
import os
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

import numpy as np

from vllm.auditing.statistics import kl_rows
from vllm.exceptions import CliError
from vllm.sampling_params import SamplingParams
from vllm.scoring.batches import Progress
from vllm.scoring.files import Item, io_errors
from vllm.scoring.report import RowReport
from vllm.scoring.scorers import EngineScorer, Results, failed
from vllm.scoring.task import Task

if TYPE_CHECKING:
    import pyarrow as pa

    from vllm.entrypoints.llm import LLM

# Cells of a table that is in memory at once; an engine has ids, logits and logprobs of each.
_MAX_CELLS = 4 << 20


def table_path(rows: Path) -> Path:
    """The file with the reference's logprobs."""
    return rows.with_name(f"{rows.name}.float32")


class TextTask(Task):
    """Readings of each text's positions: of the reference, or of a candidate, compared with it.

    Attributes:
        chunk: tokens of a piece; None: whole texts are read.
        reference: the reference's rows; None: it is read itself.
    """

    command, suffix, has_tables = "audit", "texts", False
    more_deciding = ("max_logprob_token_ids",)

    def __init__(self, args: argparse.Namespace) -> None:
        super().__init__(args)
        self.chunk: int | None = args.chunk_tokens
        self.reference: Path | None = args.reference_rows
        if args.backend is not None:
            raise CliError("whole vocabularies of texts are read in this process alone: no --backend")
        self.made_from = {"chunk_tokens": self.chunk}
        if self.reference is not None:
            self.made_from["reference"] = self.reference.name

    def engine_scorer(self, llm: LLM) -> TextScorer:
        return TextScorer(llm, self.chunk, self.output, self.reference)

    def server_scorer(self, server: Any) -> Any:
        raise NotImplementedError

    def schema(self, scorer: Any) -> pa.Schema:
        raise NotImplementedError

    def report(self, scorer: Any) -> RowReport:
        raise NotImplementedError


class TextScorer(EngineScorer):
    """Rows have own_logprobs and token_ids of the reference; kl, own_logprobs and same_top of a candidate: lists of a
    number a position."""

    taken = ("token_ids", "own_logprobs", "kl", "same_top")

    def __init__(self, llm: LLM, chunk: int | None, output: Path, reference: Path | None) -> None:
        super().__init__(llm)
        if self._tokenizer is None:
            raise CliError("--skip-tokenizer-init: texts cannot be read without a tokenizer")
        self._size, self._chunk = self._config.vocab_size, chunk
        self._step = max(1, min(256, _MAX_CELLS // self._size))
        self._bos = next(iter(self._tokenizer.encode("")), None)
        if chunk is not None and chunk > self._config.max_model_len:
            raise CliError(f"--chunk-tokens must be at most max_model_len={self._config.max_model_len}, got {chunk}")
        self._known = None if reference is None else ReferenceRows(reference)
        if self._known is None:
            self._table = _table_of(table_path(output), output, self._size)
        elif self._known.size not in (0, self._size):
            raise CliError(
                f"the vocabulary has {self._size} tokens, the reference's readings have {self._known.size:g}"
            )

    def results(self, batch: Sequence[Item], use_tqdm: bool | Callable[..., Any]) -> Iterable[Results]:
        raise NotImplementedError

    def score(
        self, batch: Sequence[Item], first_index: int, num_known: int, progress: Progress
    ) -> Iterator[dict[str, Any]]:
        """See Scorer; each row comes as soon as it is complete."""
        for index, item in list(enumerate(batch, first_index))[num_known:]:
            self._llm.reset_prefix_cache()
            results = self._read(item) if self._known is None else self._compare(self._known, index)
            yield self._row(index, item, results)

    def _read(self, item: Item) -> Results:
        assert self._tokenizer is not None
        token_ids = self._tokenizer.encode(item.text)
        pieces = self._pieces(token_ids)
        if isinstance(pieces, str):
            return failed(pieces, len(token_ids))
        own: list[float] = []
        with io_errors("write", Path(self._table.name)):
            for piece, start in pieces:
                for logprobs, following in self._tables(piece, start):
                    self._table.write(logprobs.tobytes())
                    own += logprobs[np.arange(len(following)), following].tolist()
            self._table.flush()
        return {"token_ids": token_ids, "own_logprobs": own, "num_prompt_tokens": len(token_ids)}

    def _compare(self, reference: ReferenceRows, index: int) -> Results:
        """A candidate's readings of the ids of a row of the reference."""
        known = reference.at(index)
        if "error" in known:
            return failed(f"the reference: {known['error']}", known["num_prompt_tokens"])
        token_ids = known["token_ids"]
        pieces = self._pieces(token_ids)
        if isinstance(pieces, str):
            return failed(pieces, len(token_ids))
        found: dict[str, list[Any]] = defaultdict(list)
        for piece, start in pieces:
            for logprobs, following in self._tables(piece, start):
                for name, values in compared(reference.table(len(following)), logprobs, following).items():
                    found[name] += values.tolist()
        return {**found, "num_prompt_tokens": len(token_ids)}

    def _pieces(self, token_ids: list[int]) -> list[tuple[list[int], int]] | str:
        """See `pieces_of`; or why nothing is read."""
        longest = self._config.max_model_len
        if self._chunk is not None and len(token_ids) < self._chunk:
            return f"the text has {len(token_ids)} tokens, fewer than --chunk-tokens {self._chunk}"
        if self._chunk is None and not 2 <= len(token_ids) <= longest:
            return f"the text has {len(token_ids)} tokens; it must have from 2 to {longest} (max_model_len={longest})"
        return pieces_of(token_ids, self._chunk, self._bos)

    def _tables(self, token_ids: list[int], start: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """Logprobs, float32 [rows, vocabulary], from the position `start` on, and the ids that follow, [rows]."""
        everything = list(range(self._size))
        for first in range(start, len(token_ids) - 1, self._step):
            last = min(first + self._step, len(token_ids) - 1)
            params = SamplingParams(
                max_tokens=0, prompt_logprob_token_ids=everything, prompt_logprob_start=first, logprob_ranks=False
            )
            prompts: list[Any] = [{"prompt_token_ids": token_ids[: last + 1]}]
            (output,) = self._llm.generate(prompts, [params], use_tqdm=False)
            if output.outputs[0].error is not None or output.prompt_tables is None:
                raise CliError(f"a text cannot be read: {output.outputs[0].error}")
            yield output.prompt_tables.logprobs, np.asarray(token_ids[first + 1 : last + 1])


class ReferenceRows:
    """A reference's rows and logprobs, of which later rows are asked for after earlier ones.

    Attributes:
        size: tokens of the vocabulary; 0: no row was read.
    """

    def __init__(self, rows: Path) -> None:
        """CliError: they cannot be read."""
        path = table_path(rows)
        with io_errors("read", path):
            self._table, self._rows = path.open("rb"), rows.open("rb")
            with rows.open("rb") as lines:
                positions = sum(_num_positions(line) for line in lines)
            self.size = path.stat().st_size / 4 / max(1, positions)
        self._next_index = self._next_position = 0

    def at(self, index: int) -> dict[str, Any]:
        """The row `index`; `table` begins at its first position."""
        while True:
            line, position = self._rows.readline(), self._next_position
            self._next_index, self._next_position = self._next_index + 1, position + _num_positions(line)
            if self._next_index > index:
                self._table.seek(4 * int(self.size) * position)
                row: dict[str, Any] = json.loads(line)
                return row

    def table(self, count: int) -> np.ndarray:
        """Logprobs of the next positions, float32 [count, size]."""
        raw = self._table.read(4 * int(self.size) * count)
        return np.frombuffer(raw, dtype=np.float32).reshape(count, -1)


def pieces_of(token_ids: list[int], chunk: int | None, bos: int | None) -> list[tuple[list[int], int]]:
    """The pieces of a text that are read, each with the position whose logits come first.

    Whole texts from their first token on; or, as llama.cpp does, pieces of `chunk` tokens, the first replaced by the
    one that begins a text (None: nothing does), of which the second half is read."""
    if chunk is None:
        return [(token_ids, 0)]
    starts = range(0, len(token_ids) - chunk + 1, chunk)
    pieces = [token_ids[start : start + chunk] for start in starts]
    if bos is not None:
        pieces = [[bos, *piece[1:]] for piece in pieces]
    return [(piece, chunk // 2) for piece in pieces]


def compared(reference: np.ndarray, logprobs: np.ndarray, following: np.ndarray) -> dict[str, np.ndarray]:
    """A candidate's readings of positions, from both models' logprobs, float32 [rows, vocabulary], and the ids that
    follow, [rows]: kl, float64 [rows], same_top, int [rows], own_logprobs, float32 [rows]."""
    return {
        "kl": kl_rows(reference.astype(np.float64), logprobs.astype(np.float64)),
        "same_top": (reference.argmax(1) == logprobs.argmax(1)).astype(int),
        "own_logprobs": logprobs[np.arange(len(following)), following],
    }


def _table_of(path: Path, rows: Path, size: int) -> IO[bytes]:
    """The table to append to, cut to what the rows that there are have."""
    positions = 0
    if rows.exists():
        with rows.open("rb") as lines:
            positions = sum(_num_positions(line) for line in lines if line.endswith(b"\n"))
    with io_errors("write", path):
        table = path.open("ab")
        if table.tell() < 4 * positions * size:
            raise CliError(f"{path} is shorter than {rows} says; --overwrite starts anew")
        table.truncate(4 * positions * size)
        table.seek(0, os.SEEK_END)
    return table


def _num_positions(line: bytes) -> int:
    return len(json.loads(line).get("own_logprobs", ()))
