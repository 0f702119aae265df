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
from vllm.decisions.rendering import answer_fields
from vllm.decisions.types import Decision, Question
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
    """Fields of a decision's row beside the input."""
    num_tokens = decision.usage.input_tokens
    if decision.error is not None:
        return failed(decision.error, num_tokens)
    return _results(asked, [answer_fields(each, with_diagnostics=True) for each in decision.answers], num_tokens)


def served_results(asked: QuestionSet, answer: dict[str, Any]) -> Results:
    """The same from an answer of /v1/decisions with diagnostics."""
    try:
        return _results(asked, answer["answers"], answer["usage"]["input_tokens"])
    except (TypeError, LookupError, ValueError):
        message = "/v1/decisions: the answer does not have the questions' diagnostics"
        raise CliError(f"{message}; --url must be a server of this package") from None


def _results(asked: QuestionSet, answers: Sequence[dict[str, Any]], num_tokens: int) -> Results:
    pairs = zip(asked.names, asked.questions, answers, strict=True)
    named = {name: _answer(question, own, asked.has_orders) for name, question, own in pairs}
    return {ANSWERS: named, "num_prompt_tokens": num_tokens}


def _answer(question: Question, answer: dict[str, Any], has_orders: bool) -> dict[str, Any]:
    """An answer of /v1/decisions as a row has it."""
    keys, diagnostics = [option.key for option in question.options], answer["diagnostics"]
    shares: list[float] | None
    if answer["type"] == "refusal":
        shares = None
    elif answer["type"] == "predicate":
        shares = [answer["probability"], 1 - answer["probability"]]
    else:
        shares = [each["probability"] for each in answer["probabilities"]]
    orders = [order["options"] for order in diagnostics.get("orders") or [diagnostics]]
    raw = np.asarray([[option["probability"] for option in own] for own in orders], dtype=np.float64).mean(0)
    best = None if shares is None else question.options[int(np.argmax(shares))].text
    fields: dict[str, Any] = {"type": answer["type"], "prediction": best}
    if question.type == "score":
        fields["score"] = answer.get("score")
    if question.type != "predicate":
        fields["confidence"] = answer.get("confidence")
    fields |= {
        "probabilities": None if shares is None else dict(zip(keys, shares, strict=True)),
        "raw_probabilities": dict(zip(keys, raw.tolist(), strict=True)),
        "logprobs": {key: _finite(option["logprob"]) for key, option in zip(keys, orders[0], strict=True)},
        "ranks": {key: option["rank"] for key, option in zip(keys, orders[0], strict=True)},
        "label_mass": _finite(diagnostics["label_mass"]),
        "argmax_is_label": diagnostics["argmax_is_label"],
    }
    return {**fields, "order_sensitivity": diagnostics.get("order_sensitivity", 0.0)} if has_orders else fields


def _finite(value: float | None) -> float | None:
    """JSON has null for what is not finite."""
    return None if value is None else finite(value)
