"""The parts of a decision, offline and on the server."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

QuestionType = Literal["predicate", "choice", "score"]


@dataclass(frozen=True)
class Option:
    """One allowed answer.

    Attributes:
        value: True or False of a predicate; a choice's text or boolean; the index of a score's level.
        text: how prompts show it. Distinct within a choice, also for `True` beside "true".
        description: what it means; None = its text says it.
    """

    value: str | bool | int
    text: str
    description: str | None = None

    @property
    def key(self) -> str:
        """Its name in a calibration's `bias`: a score's index, else the text."""
        return self.text if isinstance(self.value, (str, bool)) else str(self.value)


@dataclass(frozen=True)
class Question:
    """A question and its options, checked; `questions.parse_questions` makes them from OpenAI's objects."""

    type: QuestionType
    instructions: str
    options: tuple[Option, ...]
    name: str | None = None


@dataclass(frozen=True)
class OptionProbability:
    """An option's share of the options' probability, in [0, 1]. `label`: a score level's text."""

    value: str | bool | int
    probability: float
    label: str | None = None


@dataclass(frozen=True)
class OptionReading:
    """The reading of an option after one prompt.

    Attributes:
        label: the text that stands for it.
        label_token_ids: the label as the answer's tokens.
        logprob: natural-log probability that the answer begins with exactly these tokens.
        rank: of the first of them in the vocabulary; 1 is the most likely.
        probability: the share among the options, before calibration.
        token_logprobs, token_ranks: of each token, given those before it.
    """

    value: str | bool | int
    label: str
    label_token_ids: list[int]
    logprob: float
    rank: int
    probability: float
    token_logprobs: list[float]
    token_ranks: list[int]


@dataclass(frozen=True)
class OrderReading:
    """The readings of one prompt of a question.

    Attributes:
        order: the options' indices in the order in which the prompt lists them.
        prompt_token_ids: the prompt; the labels follow it.
        label_mass: probability that the answer begins with any label, in [0, 1].
        argmax_is_label: whether the most likely next token begins a label.
        lse: log of the sum of exp(logit) over the vocabulary, at the answer's first token.
        options: in the question's order.
    """

    order: list[int]
    prompt_token_ids: list[int] = field(repr=False)
    label_mass: float
    argmax_is_label: bool
    lse: float
    options: list[OptionReading]


@dataclass(frozen=True)
class Diagnostics:
    """How an answer came about.

    Attributes:
        label_mass: mean of the orders'.
        argmax_is_label: in every order.
        probabilities: the options' shares before calibration, averaged over the orders.
        order_sensitivity: greatest total variation distance, in [0, 1], between an order's shares and their mean.
        orders: one reading an order; the first order is the question's own.
        read: "labels" or "values": what stood for the options.
    """

    label_mass: float
    argmax_is_label: bool
    probabilities: list[float]
    order_sensitivity: float
    orders: list[OrderReading]
    read: str = "labels"


@dataclass(frozen=True)
class PredicateAnswer:
    """`probability`: that the predicate is true, among true and false."""

    name: str | None
    probability: float
    diagnostics: Diagnostics = field(repr=False)
    type: Literal["predicate"] = "predicate"


@dataclass(frozen=True)
class ChoiceAnswer:
    """`choice`: the most probable value, the first of equals. `confidence`: its probability times the label mass."""

    name: str | None
    choice: str | bool
    confidence: float
    probabilities: list[OptionProbability]
    diagnostics: Diagnostics = field(repr=False)
    type: Literal["choice"] = "choice"


@dataclass(frozen=True)
class ScoreAnswer:
    """`score`: the expected index of the level. `confidence`: the most probable level's probability times the label
    mass."""

    name: str | None
    score: float
    confidence: float
    probabilities: list[OptionProbability]
    diagnostics: Diagnostics = field(repr=False)
    type: Literal["score"] = "score"


@dataclass(frozen=True)
class Refusal:
    """No answer: the label mass was below min_label_mass."""

    name: str | None
    diagnostics: Diagnostics = field(repr=False)
    type: Literal["refusal"] = "refusal"


Answer = PredicateAnswer | ChoiceAnswer | ScoreAnswer | Refusal


@dataclass(frozen=True)
class DecisionUsage:
    """Tokens of a decision.

    Attributes:
        input_tokens: of all prompts: one a question and order, each with the whole input.
        cached_tokens: those of them that were not computed, as an earlier request, or another question of this one,
            had the same beginning.
        output_tokens: positions that were read: one a question.
    """

    input_tokens: int
    cached_tokens: int
    output_tokens: int


@dataclass(frozen=True)
class Decision:
    """The answers to all questions about one input, in the questions' order. `error`: why there are none."""

    answers: list[Answer]
    usage: DecisionUsage
    error: str | None = None
