"""Decisions: typed questions about an input, answered by the probabilities of their options."""

from vllm.decisions.params import DecisionParams
from vllm.decisions.types import (
    Answer,
    ChoiceAnswer,
    Decision,
    DecisionUsage,
    Diagnostics,
    Option,
    OptionProbability,
    OptionReading,
    OrderReading,
    PredicateAnswer,
    Question,
    Refusal,
    ScoreAnswer,
)

__all__ = [
    "Answer", "ChoiceAnswer", "Decision", "DecisionParams", "DecisionUsage", "Diagnostics", "Option",
    "OptionProbability", "OptionReading", "OrderReading", "PredicateAnswer", "Question", "Refusal", "ScoreAnswer",
]  # fmt: skip
