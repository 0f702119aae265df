"""Known answers of `vllm decide --gold`: columns of the input, compared with the probabilities."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from vllm.decisions.calibration import Scaling
from vllm.decisions.evaluation import Evaluation, evaluate
from vllm.decisions.fitting import HeldOut, fit_scaling, measure_on_halves
from vllm.decisions.types import Question
from vllm.exceptions import CliError
from vllm.scoring.decide.records import ANSWERS, QuestionSet
from vllm.scoring.files import Item

_TRUE, _FALSE = ("true", "yes", "1"), ("false", "no", "0")


def gold_columns(given: Sequence[str], asked: QuestionSet) -> dict[int, str]:
    """Columns by question, from arguments COLUMN (of a single question) or QUESTION=COLUMN."""
    columns: dict[int, str] = {}
    for argument in given:
        name, is_pair, column = argument.partition("=")
        if is_pair and name in asked.names:
            index = asked.names.index(name)
        elif len(asked.questions) == 1:
            index, column = 0, argument
        else:
            known = ", ".join(asked.names)
            raise CliError(f"--gold {argument}: write QUESTION=COLUMN, with one of the questions {known}")
        if index in columns:
            raise CliError(f"--gold: two columns for the question {asked.names[index]!r}")
        columns[index] = column
    return columns


class Gold:
    """The known answers of one question, with the probabilities of those rows that have both.

    Attributes:
        name: of the question.
        num_refused: rows with a known answer whose question was refused.
    """

    def __init__(self, asked: QuestionSet, index: int, column: str) -> None:
        self.name, self.question = asked.names[index], asked.questions[index]
        self._keys, self._column = asked.keys[index], column
        self._shares: list[list[float]] = []
        self._raw: list[list[float]] = []
        self._known: list[int] = []
        self.num_refused = 0

    def known(self, input_name: str, item: Item) -> int | None:
        """The known option's index; None where the column is empty. A CliError names the line of another value."""
        if self._column not in item.fields:
            there = ", ".join(map(repr, item.fields)) or "none"
            raise CliError(f"{input_name}:{item.line}: no field {self._column!r} for --gold; there is {there}")
        value = item.fields[self._column]
        if value is None or value == "":
            return None
        index = option_index(self.question, value)
        if index is None:
            texts = ", ".join(repr(option.text) for option in self.question.options[:20])
            place = f"{input_name}:{item.line}: {self._column!r} (--gold)"
            raise CliError(f"{place} is {value!r}, and no option of {self.name!r}: {texts}")
        return index

    def add(self, input_name: str, item: Item, record: dict[str, Any]) -> None:
        """Add a row; one without an answer, or without a known one, does not count."""
        index = self.known(input_name, item)
        if index is None or ANSWERS not in record:
            return
        answer = record[ANSWERS][self.name]
        if answer["probabilities"] is None:
            self.num_refused += 1
            return
        self._shares.append([answer["probabilities"][key] for key in self._keys])
        self._raw.append([answer["raw_probabilities"][key] for key in self._keys])
        self._known.append(index)

    @property
    def num_rows(self) -> int:
        """Rows that can be measured."""
        return len(self._known)

    def evaluate(self) -> Evaluation:
        """Measures the probabilities as answered; needs a row."""
        return evaluate(self._shares, self._known, [option.text for option in self.question.options])

    def fit(self) -> Scaling:
        """The scaling that fits the raw probabilities of all rows best."""
        found = fit_scaling(self._raw, self._known, self._keys)
        return Scaling(found.temperature, found.bias, [option.text for option in self.question.options])

    def held_out(self) -> HeldOut:
        """Measures of a fit on one half of the rows, taken on the other."""
        return measure_on_halves(self._raw, self._known, self._keys)


def option_index(question: Question, value: Any) -> int | None:
    """The option that a known answer names: by its text, a score also by its index, a predicate also by yes, no, 1 and
    0."""
    text = str(value).strip()
    if question.type == "predicate":
        lowered = text.lower()
        return 0 if lowered in _TRUE else 1 if lowered in _FALSE else None
    wanted = text.lower() if isinstance(value, bool) else text
    found = [index for index, option in enumerate(question.options) if option.text.strip() == wanted]
    if not found and question.type == "score":
        found = [index for index, option in enumerate(question.options) if option.key == wanted]
    return found[0] if found else None
