"""Decisions batch by batch: by an engine in this process, or by a server."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vllm.decisions.params import DecisionParams
from vllm.decisions.plan import DecisionPlan
from vllm.exceptions import CliError, VLLMValidationError
from vllm.scoring.batches import Progress
from vllm.scoring.decide.records import ANSWERS, QuestionSet, decision_record, make_record, served_record
from vllm.scoring.files import Item
from vllm.scoring.server import Server
from vllm.utils.server_client import ServerError

if TYPE_CHECKING:
    from vllm.entrypoints.llm import LLM
    from vllm.scoring.columns import Columns, FieldKinds

_PATH = "/v1/decisions"
_PROBE = "a"


class BatchDecider:
    """Answers the questions about batches of texts; as with BatchScorer, a row depends on its own batch alone."""

    def __init__(self, llm: LLM, *, asked: QuestionSet, params: DecisionParams) -> None:
        engine = llm.llm_engine
        self._llm, self._asked, self._params = llm, asked, params
        self._config, self._tokenizer = engine.model_config, engine.tokenizer
        self.model_name = Path(engine.model_config.model).name
        try:
            # What no text could be asked is an error of the whole run.
            self._plan(_PROBE)
        except VLLMValidationError as error:
            raise CliError(error.args[0]) from None

    def score(
        self, batch: Sequence[Item], first_index: int, num_known: int, progress: Progress
    ) -> Iterable[dict[str, Any]]:
        """See Scorer."""
        plans: list[DecisionPlan | str] = []
        for item in batch:
            try:
                plans.append(self._plan(item.text))
            except VLLMValidationError as error:
                plans.append(error.args[0])
        usable = [plan for plan in plans if isinstance(plan, DecisionPlan)]
        self._llm.reset_prefix_cache()
        decisions = iter(self._llm.decide_plans(usable, use_tqdm=progress.of_batch(first_index, len(batch))))
        records = [
            decision_record(index, item, self._asked, next(decisions))
            if isinstance(plan, DecisionPlan)
            else make_record(index, item, None, plan)
            for index, (item, plan) in enumerate(zip(batch, plans, strict=True), first_index)
        ]
        return records[num_known:]

    def columns(self, kinds: FieldKinds) -> Columns:
        """See LocalScorer."""
        return columns_of(self._asked, kinds)

    def _plan(self, text: str) -> DecisionPlan:
        return DecisionPlan(self._config, self._tokenizer, text, self._asked.questions, self._params)


class ServerDecider:
    """The same with a running server, a request a text."""

    def __init__(self, server: Server, *, asked: QuestionSet, fields: dict[str, Any]) -> None:
        """`fields`: further ones of each request."""
        self._server, self._asked = server, asked
        self._fields = {**fields, "questions": asked.given, "diagnostics": True}
        self.model_name = server.model_name
        served_record(0, Item(0, _PROBE, {}), asked, server.wait(self._post(_PROBE)))

    def score(
        self, batch: Sequence[Item], first_index: int, num_known: int, progress: Progress
    ) -> Iterator[dict[str, Any]]:
        """See Scorer. Each row comes as soon as it is complete; an error that is not of a single text is raised."""
        rows = list(enumerate(batch))[num_known:]
        return self._server.in_order([self._row(first_index + offset, item) for offset, item in rows])

    async def _row(self, index: int, item: Item) -> dict[str, Any]:
        try:
            answer = await self._post(item.text)
        except ServerError as error:
            # The probe had the same questions: what is refused is the text.
            if error.status not in (400, 413, 500):
                raise
            return make_record(index, item, None, error.message)
        return served_record(index, item, self._asked, answer)

    async def _post(self, text: str) -> dict[str, Any]:
        return await self._server.post(_PATH, {"input": text, **self._fields})


def columns_of(asked: QuestionSet, kinds: FieldKinds) -> Columns:
    """The columns of a run's rows."""
    from vllm.scoring.columns import Columns

    return Columns(kinds, asked.schema(), spread=ANSWERS)
