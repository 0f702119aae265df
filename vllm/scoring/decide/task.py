"""`vllm decide`: questions about a file's texts, answered by an engine in this process or by a server."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

from vllm.decisions.params import DecisionParams
from vllm.decisions.plan import DecisionPlan
from vllm.exceptions import CliError, VLLMValidationError
from vllm.scoring.decide.gold import Gold, gold_columns
from vllm.scoring.decide.records import ANSWERS, QuestionSet, decision_results, served_results
from vllm.scoring.decide.report import DecisionReport, Measures
from vllm.scoring.files import Item
from vllm.scoring.media import RowMedia
from vllm.scoring.scorers import EngineScorer, Results, ServerScorer, failed
from vllm.scoring.server import Server
from vllm.scoring.task import Task

if TYPE_CHECKING:
    import pyarrow as pa

    from vllm.entrypoints.llm import LLM

# Options of a request, as arguments have them too.
_OPTIONS = ("read", "permutations", "min_label_mass", "truncate_prompt_tokens")
_PATH = "/v1/decisions"
_PROBE = "a"


class DecideTask(Task):
    """The answers to typed questions about each text."""

    command, suffix, spread = "decide", "decisions", ANSWERS

    def __init__(self, args: argparse.Namespace) -> None:
        """CliError: what cannot be asked, also for a calibration of other labels."""
        super().__init__(args)
        self._measures = None
        if args.gold is not None:
            self._measures = Measures(
                self.output.with_suffix(".evaluation.json"), self.picture_path(args), args.fit_calibration
            )
            self.outputs = self._measures.paths()
        self.inputs += [("--questions", args.questions), ("--calibration", args.calibration)]
        self._asked = QuestionSet.load(args.questions, args.permutations > 1)
        options = {name: getattr(args, name) for name in _OPTIONS}
        try:
            self._params = DecisionParams(**options, calibration=args.calibration)
            self._params.scalings.check(self._asked.questions)
        except VLLMValidationError as error:
            raise CliError(error.args[0]) from None
        calibration = None if args.calibration is None else self._params.scalings.to_dict()
        self.made_from = {"questions": self._asked.given, **options, "calibration": calibration}
        self._golds = self._find_golds(args)

    def _find_golds(self, args: argparse.Namespace) -> list[Gold]:
        columns = gold_columns(args.gold or (), self._asked)
        for index in columns:
            if args.fit_calibration is not None and self._asked.questions[index].name is None:
                raise CliError(f"--fit-calibration: questions[{index}] has no name, by which a calibration is found")
        self._num_known = dict.fromkeys((self._asked.names[index] for index in columns), 0)
        self._least_known = 1 if args.fit_calibration is None else 2
        return [Gold(self._asked, index, column) for index, column in columns.items()]

    def check(self, item: Item) -> None:
        for gold in self._golds:
            self._num_known[gold.name] += gold.known(self.input_name, item) is not None

    def check_all(self) -> None:
        least = self._least_known
        for name, count in self._num_known.items():
            if count < least:
                raise CliError(f"--gold: {count} rows have a known answer to {name!r}; at least {least} must have one")

    def engine_scorer(self, llm: LLM) -> EngineDecider:
        return EngineDecider(llm, self._asked, self._params, self.media)

    def server_scorer(self, server: Server) -> ServerDecider:
        options = {name: self.made_from[name] for name in (*_OPTIONS, "calibration")}
        given = {name: own for name, own in options.items() if own is not None}
        return ServerDecider(server, self._asked, given, self.media)

    def schema(self, scorer: Any) -> pa.Schema:
        return self._asked.schema()

    def report(self, scorer: Any) -> DecisionReport:
        return DecisionReport(self._asked, self._golds, self.input_name, self._measures)


class EngineDecider(EngineScorer):
    taken = (ANSWERS,)

    def __init__(self, llm: LLM, asked: QuestionSet, params: DecisionParams, media: RowMedia | None = None) -> None:
        super().__init__(llm, media)
        self._asked, self._params = asked, params
        try:
            # A question that no text could be asked is an error of the whole run.
            self._plan(Item(0, _PROBE, {}))
        except VLLMValidationError as error:
            raise CliError(error.args[0]) from None

    def results(self, batch: Sequence[Item], use_tqdm: bool | Callable[..., Any]) -> Iterable[Results]:
        plans: list[DecisionPlan | str] = []
        for item in batch:
            try:
                plans.append(self._plan(item))
            except VLLMValidationError as error:
                plans.append(error.args[0])
        usable = [plan for plan in plans if isinstance(plan, DecisionPlan)]
        decisions = iter(self._llm.decide_plans(usable, use_tqdm=use_tqdm))
        return [
            failed(plan) if isinstance(plan, str) else decision_results(self._asked, next(decisions)) for plan in plans
        ]

    def _plan(self, item: Item) -> DecisionPlan:
        return self._llm.decision_plan(_input(item, self.media), self._asked.questions, self._params)


class ServerDecider(ServerScorer):
    taken = (ANSWERS,)

    def __init__(
        self, server: Server, asked: QuestionSet, fields: dict[str, Any], media: RowMedia | None = None
    ) -> None:
        """`fields`: further ones of each request."""
        super().__init__(server, media)
        self._asked, self._fields = asked, {**fields, "questions": asked.given, "diagnostics": True}
        # Ask of a probe first: a later refusal is then due to its text.
        server.wait(self.result(Item(0, _PROBE, {})))

    async def result(self, item: Item) -> Results:
        body = {"input": _input(item, self.media), **self._fields}
        return served_results(self._asked, await self._server.post(_PATH, body))


def _input(item: Item, media: RowMedia | None) -> Any:
    """The input that a row asks about: its text, or a message of its media and its text."""
    parts = [] if media is None else media.parts(item)
    if not parts:
        return item.text
    if item.text:
        parts.append({"type": "input_text", "text": item.text})
    return [{"role": "user", "content": parts}]
