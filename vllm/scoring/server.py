"""`vllm score` with a running server."""

from __future__ import annotations

import argparse
import asyncio
import math
from collections.abc import Coroutine, Iterator, Sequence
from typing import Any, TypeVar

import numpy as np

from vllm.exceptions import CliError
from vllm.outputs import LabelScores
from vllm.scoring.batches import Progress, length_fault
from vllm.scoring.files import Item
from vllm.scoring.labels.records import Labels, make_record
from vllm.scoring.labels.templates import Template
from vllm.utils.server_client import ServerError, ServerSession, with_retries

Result = TypeVar("Result")

CONCURRENCY = 16
_PATH = "/generative_scoring"
_PROBE = "a"


class Server(ServerSession):
    def __init__(self, args: argparse.Namespace) -> None:
        super().__init__(args)
        self._slots = asyncio.Semaphore(args.concurrency or CONCURRENCY)
        self.max_model_len: int = self.card["max_model_len"]

    def deciding(self) -> dict[str, Any]:
        """What decides the rows; not the URL, as the same model may be served elsewhere."""
        answer = self.wait(self.client.get("/version"))
        try:
            version = answer["version"]
        except (TypeError, KeyError):
            raise CliError(f"{self.client.url}/version: the answer names no version") from None
        return {"server_version": version, "model": self.model_name, "max_model_len": self.max_model_len}

    async def post(self, path: str, fields: dict[str, Any]) -> dict[str, Any]:
        """The answer to a request about the model, tried again while the server is overloaded or away."""
        body = {"model": self.model_name, **fields}
        async with self._slots:
            answer: dict[str, Any] = await with_retries(lambda: self.client.post(path, body))
        return answer

    def in_order(self, works: Sequence[Coroutine[Any, Any, Result]]) -> Iterator[Result]:
        """The results of all, which run concurrently; leaving the iteration cancels the rest."""
        tasks = [self.loop.create_task(work) for work in works]
        try:
            for task in tasks:
                yield self.wait(task)
        finally:
            for task in tasks:
                task.cancel()
            self.wait(asyncio.gather(*tasks, return_exceptions=True))


class ServerScorer:
    """Scores batches, a request a text; see BatchScorer. The labels are as the server tokenises them."""

    def __init__(
        self, server: Server, *, template: Template | None, given: Sequence[str] | Sequence[int], input_name: str
    ) -> None:
        self._server = server
        self.model_name = server.model_name
        self._input_name = input_name
        self._fields = {("labels" if isinstance(given[0], str) else "label_token_ids"): list(given)}
        # One answer shows whether the labels can be scored, and how they are tokenised.
        entries = _item(server.wait(self._post(_PROBE)), len(given))["labels"]
        texts, token_ids = ([entry[name] for entry in entries] for name in ("label", "token_ids"))
        self.labels = Labels([str(label) for label in given], texts, token_ids)
        self._template = template or Template.default(self.labels.texts)

    def score(
        self, batch: Sequence[Item], first_index: int, num_known: int, progress: Progress
    ) -> Iterator[dict[str, Any]]:
        """As BatchScorer.score, each row as soon as it is complete. An error that is not of a single text is raised."""
        rows = list(enumerate(batch))[num_known:]
        return self._server.in_order([self._row(first_index + offset, item) for offset, item in rows])

    async def _row(self, index: int, item: Item) -> dict[str, Any]:
        prompt = self._template.render(self._input_name, item)
        try:
            scored = _item(await self._post(prompt), len(self.labels.names))
        except ServerError as error:
            # Of this text alone: too long, empty, or one whose logits are not finite.
            if error.status not in (413, 500) and (error.status, error.param) != (400, "items"):
                raise
            num_tokens = await self._count(prompt)
            fault = length_fault(num_tokens, self._server.max_model_len, self.labels) if num_tokens is not None else ""
            return make_record(index, item, num_tokens, fault or error.message, self.labels)
        return make_record(index, item, scored["num_prompt_tokens"], _scores(scored, self.labels), self.labels)

    async def _post(self, prompt: str) -> dict[str, Any]:
        return await self._server.post(_PATH, {"query": "", "items": [prompt], **self._fields})

    async def _count(self, prompt: str) -> int | None:
        try:
            count: int = (await self._server.post("/tokenize", {"prompt": prompt}))["count"]
        except ServerError:
            return None
        return count


def _item(answer: dict[str, Any], num_labels: int) -> dict[str, Any]:
    try:
        item: dict[str, Any] = answer["data"][0]
        if len(item["labels"]) == num_labels:
            return item
    except (TypeError, LookupError):
        pass
    raise CliError(f"{_PATH}: the answer does not have the labels' scores; --url must be a server of this package")


def _scores(item: dict[str, Any], labels: Labels) -> LabelScores:
    """An item of an answer as the engine's result; JSON has null for minus infinity."""
    entries = item["labels"]
    logprobs = np.asarray([_number(entry["logprob"]) for entry in entries])
    probabilities = np.asarray([entry["probability"] for entry in entries], dtype=np.float64)  # null is NaN
    if len(entries) == 1 and np.isfinite(logprobs[0]):
        # The server returns a single label's probability in the vocabulary.
        probabilities = np.ones(1)
    token_logprobs = [entry.get("token_logprobs") or [entry["logprob"]] for entry in entries]
    # Logits of further tokens are not in the answer.
    further = [[math.nan] * (len(ids) - 1) for ids in labels.token_ids]
    token_logits = [[entry["logit"], *rest] for entry, rest in zip(entries, further, strict=True)]
    return LabelScores(
        prompt=None,
        prompt_token_ids=[],
        label_texts=[entry["label"] for entry in entries],
        label_token_ids=labels.token_ids,
        logprobs=logprobs,
        probabilities=probabilities,
        mass=math.nan if item["label_mass"] is None else item["label_mass"],
        token_logprobs=np.asarray([_number(value) for each in token_logprobs for value in each]),
        token_ranks=np.concatenate([entry.get("token_ranks") or [entry["rank"]] for entry in entries]),
        token_logits=np.asarray([_number(value) for each in token_logits for value in each]),
    )


def _number(value: float | None) -> float:
    return -math.inf if value is None else value
