"""Rows of `vllm decide`: answers as JSON, and as columns."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from vllm.decisions.questions import parse_questions
from vllm.decisions.types import Answer, Decision, PredicateAnswer, Question, Refusal, ScoreAnswer
from vllm.exceptions import CliError, VLLMValidationError
from vllm.scoring.files import read_text
from vllm.scoring.labels.records import finite
from vllm.scoring.scorers import Results, failed

if TYPE_CHECKING:
    import pyarrow as pa

ANSWERS = "answers"
"""The column with an object a question."""


@dataclass(frozen=True)
class QuestionSet:
    """The questions of a run.

    Attributes:
        given: OpenAI's objects.
        questions: the same, checked.
        has_orders: each is asked in several orders of its options.
    """

    given: list[Any]
    questions: list[Question]
    has_orders: bool = False

    @classmethod
    def load(cls, path: Path, has_orders: bool) -> QuestionSet:
        """From a JSON file: a list of questions, or an object whose `questions` is one. A CliError names the file."""
        try:
            value = json.loads(read_text(path))
        except (ValueError, RecursionError) as error:
            raise CliError(f"{path.name}: not JSON: {error}") from None
        given: Any = value.get("questions") if isinstance(value, dict) else value
        try:
            found = cls(given, parse_questions(given), has_orders)
        except VLLMValidationError as error:
            raise CliError(f"{path.name}: {error.args[0]}") from None
        repeated = sorted({name for name in found.names if found.names.count(name) > 1})
        if repeated:
            raise CliError(f"{path.name}: two questions have the name {repeated[0]!r}; rows hold answers by names")
        return found

    @cached_property
    def names(self) -> list[str]:
        """Keys of the answers in rows: the questions' names, question_N (from 0) for those without."""
        return [
            f"question_{index}" if question.name is None else question.name
            for index, question in enumerate(self.questions)
        ]

    @cached_property
    def keys(self) -> list[list[str]]:
        """The options' keys of each question, in order."""
        return [[option.key for option in question.options] for question in self.questions]

    def schema(self) -> pa.Schema:
        """The columns of results."""
        import pyarrow as pa

        answers = [
            (name, _answer_type(question, keys, self.has_orders))
            for name, question, keys in zip(self.names, self.questions, self.keys, strict=True)
        ]
        return pa.schema({ANSWERS: pa.struct(answers), "num_prompt_tokens": pa.int64(), "error": pa.string()})


def _answer_type(question: Question, keys: Sequence[str], has_orders: bool) -> pa.DataType:
    import pyarrow as pa

    number, truth = pa.float64(), pa.bool_()
    floats, integers = (pa.struct([(key, kind) for key in keys]) for kind in (number, pa.int64()))
    fields: dict[str, pa.DataType] = {"type": pa.string(), "prediction": pa.string()}
    if question.type == "score":
        fields["score"] = number
    if question.type != "predicate":
        fields["confidence"] = number
    fields |= {"probabilities": floats, "raw_probabilities": floats, "logprobs": floats, "ranks": integers}
    fields |= {"label_mass": number, "argmax_is_label": truth}
    if has_orders:
        fields["order_sensitivity"] = number
    return pa.struct(list(fields.items()))


def decision_results(asked: QuestionSet, decision: Decision) -> Results:
    """What a decision's row has beside the input."""
    num_tokens = decision.usage.input_tokens
    if decision.error is not None:
        return failed(decision.error, num_tokens)
    pairs = zip(asked.names, asked.questions, decision.answers, strict=True)
    answers = {name: _from_answer(question, own, asked.has_orders) for name, question, own in pairs}
    return {ANSWERS: answers, "num_prompt_tokens": num_tokens}


def served_results(asked: QuestionSet, answer: dict[str, Any]) -> Results:
    """The same from an answer of /v1/decisions with diagnostics."""
    try:
        pairs = zip(asked.names, asked.questions, answer["answers"], strict=True)
        answers = {name: _from_json(question, own, asked.has_orders) for name, question, own in pairs}
        return {ANSWERS: answers, "num_prompt_tokens": answer["usage"]["input_tokens"]}
    except (TypeError, LookupError, ValueError):
        message = "/v1/decisions: the answer does not have the questions' diagnostics"
        raise CliError(f"{message}; --url must be a server of this package") from None


def _from_answer(question: Question, answer: Answer, has_orders: bool) -> dict[str, Any]:
    """An answer's object in a row."""
    diagnostics = answer.diagnostics
    shares: list[float] | None
    if isinstance(answer, Refusal):
        shares = None
    elif isinstance(answer, PredicateAnswer):
        shares = [answer.probability, 1 - answer.probability]
    else:
        shares = [each.probability for each in answer.probabilities]
    first = diagnostics.orders[0].options
    return _fields(
        question,
        answer.type,
        shares,
        score=answer.score if isinstance(answer, ScoreAnswer) else None,
        confidence=getattr(answer, "confidence", None),
        raw=diagnostics.probabilities,
        logprobs=[option.logprob for option in first],
        ranks=[option.rank for option in first],
        others={"label_mass": finite(diagnostics.label_mass), "argmax_is_label": diagnostics.argmax_is_label}
        | ({"order_sensitivity": diagnostics.order_sensitivity} if has_orders else {}),
    )


def _from_json(question: Question, answer: dict[str, Any], has_orders: bool) -> dict[str, Any]:
    diagnostics = answer["diagnostics"]
    shares: list[float] | None
    if answer["type"] == "refusal":
        shares = None
    elif answer["type"] == "predicate":
        shares = [answer["probability"], 1 - answer["probability"]]
    else:
        shares = [each["probability"] for each in answer["probabilities"]]
    orders = [order["options"] for order in diagnostics.get("orders") or [diagnostics]]
    raw = np.asarray([[option["probability"] for option in own] for own in orders], dtype=np.float64).mean(0)
    names = ("label_mass", "argmax_is_label")
    return _fields(
        question,
        answer["type"],
        shares,
        score=answer.get("score"),
        confidence=answer.get("confidence"),
        raw=raw.tolist(),
        logprobs=[option["logprob"] for option in orders[0]],
        ranks=[option["rank"] for option in orders[0]],
        others={name: diagnostics[name] for name in names}
        | ({"order_sensitivity": diagnostics.get("order_sensitivity", 0.0)} if has_orders else {}),
    )


def _fields(
    question: Question,
    kind: str,
    shares: Sequence[float] | None,
    *,
    score: float | None,
    confidence: float | None,
    raw: Sequence[float],
    logprobs: Sequence[float | None],
    ranks: Sequence[int],
    others: dict[str, Any],
) -> dict[str, Any]:
    keys = [option.key for option in question.options]
    best = None if shares is None else question.options[int(np.argmax(shares))].text
    fields: dict[str, Any] = {"type": kind, "prediction": best}
    if question.type == "score":
        fields["score"] = score
    if question.type != "predicate":
        fields["confidence"] = confidence
    return {
        **fields,
        "probabilities": None if shares is None else dict(zip(keys, shares, strict=True)),
        "raw_probabilities": dict(zip(keys, raw, strict=True)),
        "logprobs": {key: None if own is None else finite(own) for key, own in zip(keys, logprobs, strict=True)},
        "ranks": dict(zip(keys, ranks, strict=True)),
        **others,
    }
