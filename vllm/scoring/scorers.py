"""Scorers make rows of texts, batch by batch: by an engine in this process, or by a running server."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vllm.exceptions import VLLMValidationError
from vllm.scoring.batches import Progress
from vllm.scoring.files import Item
from vllm.scoring.media import RowMedia
from vllm.utils.server_client import ServerError

if TYPE_CHECKING:
    from vllm.entrypoints.llm import LLM
    from vllm.scoring.server import Server

Results = dict[str, Any]
"""The fields of a row beside the input: a kind's results and num_prompt_tokens, or an error."""

_OF_EACH_KIND = ("num_prompt_tokens", "error")
# Statuses of an answer that is about one text.
_OF_A_TEXT = (400, 413, 500)


class Scorer(ABC):
    """
    Attributes:
        model_name: of the model that is asked.
        taken: names of results that no field of the input may have, also in a row without them; further ones of each
            kind are num_prompt_tokens and error.
        media: the rows' pictures and videos; None: they have none.
    """

    model_name: str
    taken: Sequence[str] = ()
    media: RowMedia | None = None

    @abstractmethod
    def score(
        self, batch: Sequence[Item], first_index: int, num_known: int, progress: Progress
    ) -> Iterable[dict[str, Any]]:
        """The rows of `batch[num_known:]`, the batch's first having index `first_index`; one for a text that cannot be
        scored has an error."""

    def _row(self, index: int, item: Item, results: Results) -> dict[str, Any]:
        """The input's other fields are kept where no result has their name."""
        record: dict[str, Any] = {"index": index, "text": item.text}
        taken = {*record, *results, *_OF_EACH_KIND, *self.taken}
        fields = item.fields if self.media is None else self.media.shown(item.fields)
        return {**record, **{name: value for name, value in fields.items() if name not in taken}, **results}


class EngineScorer(Scorer):
    """Asks `llm`, so that a row depends on its own batch alone, and a resumed run repeats an uninterrupted one.

    The last bits of a reading depend on the batch composition and on what is cached: a batch is always the same rows,
    and begins with an empty prefix cache.
    """

    def __init__(self, llm: LLM, media: RowMedia | None = None) -> None:
        self.media = media
        self._llm, self._config, self._tokenizer = llm, llm.model_config, llm.llm_engine.tokenizer
        self.model_name = Path(llm.model_config.model).name

    @abstractmethod
    def results(self, batch: Sequence[Item], use_tqdm: bool | Callable[..., Any]) -> Iterable[Results]:
        """The results of all texts, in order."""

    def score(
        self, batch: Sequence[Item], first_index: int, num_known: int, progress: Progress
    ) -> Iterable[dict[str, Any]]:
        """See Scorer. The known rows are scored again: the batch composition decides the last bits."""
        self._llm.reset_prefix_cache()
        results = self.results(batch, progress.of_batch(first_index, len(batch)))
        rows = enumerate(zip(batch, results, strict=True), first_index)
        return [self._row(index, item, own) for index, (item, own) in rows][num_known:]


class ServerScorer(Scorer):
    """Asks a server, a request a text."""

    def __init__(self, server: Server, media: RowMedia | None = None) -> None:
        self.media = media
        self._server, self.model_name = server, server.model_name

    @abstractmethod
    async def result(self, item: Item) -> Results:
        """The results of a text."""

    async def refused(self, item: Item, error: ServerError) -> Results:
        """The results of a text that the server refuses; raises an error that is not of a single text."""
        if error.status not in _OF_A_TEXT:
            raise error
        return self.failed(error.message)

    def failed(self, reason: str) -> Results:
        """The results of a text that cannot be scored."""
        return failed(reason)

    def score(
        self, batch: Sequence[Item], first_index: int, num_known: int, progress: Progress
    ) -> Iterator[dict[str, Any]]:
        """See Scorer. Each row comes as soon as it is complete."""
        rows = list(enumerate(batch, first_index))[num_known:]
        return self._server.in_order([self._answered(index, item) for index, item in rows])

    async def _answered(self, index: int, item: Item) -> dict[str, Any]:
        try:
            results = await self.result(item)
        except ServerError as error:
            results = await self.refused(item, error)
        except VLLMValidationError as error:  # a file that cannot be read any more
            results = self.failed(str(error.args[0]))
        return self._row(index, item, results)


def failed(reason: str, num_prompt_tokens: int | None = None) -> Results:
    """The results of a text that cannot be scored."""
    return {"error": reason, "num_prompt_tokens": num_prompt_tokens}
