"""`vllm score` batch by batch, with an engine in this process."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from vllm.exceptions import CliError
from vllm.scoring.files import Item, TextFile
from vllm.scoring.labels.records import Labels, make_record
from vllm.scoring.labels.templates import Template

if TYPE_CHECKING:
    from vllm.entrypoints.llm import LLM
    from vllm.outputs import LabelScores
    from vllm.scoring.columns import Columns, FieldKinds

BATCH_ROWS = 256

_DECIDING = (
    "model", "revision", "hf_overrides", "quantization", "dtype", "max_model_len",
    "tokenizer", "tokenizer_revision", "tokenizer_mode",
)  # fmt: skip


def deciding(args: object) -> dict[str, Any]:
    """The engine arguments that decide what is read. Others, such as the size of a step, change only speed and last
    bits, and a run that was killed for memory may need them changed."""
    return {name: getattr(args, name) for name in _DECIDING}


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


class Scorer(Protocol):
    """What makes rows of texts."""

    model_name: str

    def score(
        self, batch: Sequence[Item], first_index: int, num_known: int, progress: Progress
    ) -> Iterable[dict[str, Any]]:
        """The rows of `batch[num_known:]`, the batch's first having index `first_index`; one for a text that cannot be
        scored has an error."""


class LocalScorer(Scorer, Protocol):
    """One with an engine in its process."""

    def columns(self, kinds: FieldKinds) -> Columns:
        """Of its rows; `kinds` are of the whole input."""


class BatchScorer:
    """Scores batches so that a row depends on its own batch alone, and a resumed run repeats an uninterrupted one.

    The last bits of a reading depend on the batch composition and on what is cached: a batch is always the same rows,
    and begins with an empty prefix cache. `template` None: the default one; `given`: the labels, as texts or as token
    ids; `input_name` is for messages.
    """

    def __init__(
        self, llm: LLM, *, template: Template | None, given: Sequence[str] | Sequence[int], input_name: str
    ) -> None:
        engine = llm.llm_engine
        if engine.tokenizer is None:
            raise CliError("--skip-tokenizer-init: texts cannot be scored without a tokenizer")
        self._llm, self._tokenizer, self._input_name = llm, engine.tokenizer, input_name
        self.model_name = Path(engine.model_config.model).name
        self._max_model_len = engine.model_config.max_model_len
        self.labels = Labels.resolve(given, engine.tokenizer, engine.model_config.vocab_size)
        self._template = template or Template.default(self.labels.texts)
        if self.labels.longest > self._max_model_len:
            raise CliError(
                f"the longest label has {self.labels.longest} tokens and leaves no room for a prompt "
                f"(max_model_len={self._max_model_len})"
            )

    def score(
        self, batch: Sequence[Item], first_index: int, num_known: int, progress: Progress
    ) -> Iterable[dict[str, Any]]:
        """The rows of `batch[num_known:]`, the batch's first having index `first_index`; one for a prompt of no or too
        many tokens has an error. The known rows are scored again: the batch composition decides the last bits."""
        prompts = self._tokenizer.encode_batch([self._template.render(self._input_name, item) for item in batch])
        results: list[LabelScores | str] = [length_fault(len(ids), self._max_model_len, self.labels) for ids in prompts]
        usable = [i for i, fault in enumerate(results) if not fault]
        self._llm.reset_prefix_cache()
        scores = self._llm.score_labels(
            [prompts[i] for i in usable], self.labels.token_ids, use_tqdm=progress.of_batch(first_index, len(batch))
        )
        for i, own in zip(usable, scores, strict=True):
            results[i] = own
        records = [
            make_record(index, item, len(ids), result, self.labels)
            for index, (item, ids, result) in enumerate(zip(batch, prompts, results, strict=True), first_index)
        ]
        return records[num_known:]

    def columns(self, kinds: FieldKinds) -> Columns:
        """See LocalScorer."""
        from vllm.scoring.columns import Columns, result_schema

        return Columns(kinds, result_schema(self.labels))


def length_fault(num_tokens: int, max_model_len: int, labels: Labels) -> str:
    """Why a prompt of so many tokens cannot be scored; empty if it can."""
    # A label's last token is read, never run through the model.
    most = max_model_len - labels.longest + 1
    if 0 < num_tokens <= most:
        return ""
    return (
        f"the prompt has {num_tokens} tokens; it must have from 1 to {most} "
        f"(max_model_len={max_model_len}, the longest label has {labels.longest})"
    )
