"""Formulas: from the readings of a question's prompts to its answer."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from vllm.decisions.calibration import Scaling
from vllm.decisions.types import (
    Answer,
    ChoiceAnswer,
    Diagnostics,
    OptionProbability,
    OptionReading,
    OrderReading,
    PredicateAnswer,
    Question,
    Refusal,
    ScoreAnswer,
)
from vllm.outputs import LabelScores


def order_reading(question: Question, order: Sequence[int], scores: LabelScores, places: Sequence[int]) -> OrderReading:
    """The readings of one prompt. `places`: each option's index among the labels of `scores`."""
    labels = scores.labels
    options = []
    for option, place in zip(question.options, places, strict=True):
        own = labels[place]
        options.append(
            OptionReading(
                option.value,
                own.label or "",
                own.token_ids,
                own.logprob,
                own.token_ranks[0],
                float(scores.probabilities[place]),
                own.token_logprobs,
                own.token_ranks,
            )
        )
    first = labels[0]
    return OrderReading(
        order=list(order),
        prompt_token_ids=scores.prompt_token_ids,
        label_mass=scores.mass,
        argmax_is_label=any(option.rank == 1 for option in options),
        lse=first.token_logits[0] - first.token_logprobs[0],
        options=options,
    )


def diagnose(orders: Sequence[OrderReading], read: str = "labels") -> Diagnostics:
    """All orders' readings together."""
    shares = np.asarray(
        [[option.probability for option in each.options] for each in orders]
    )  # float64 [orders, options]
    mean = shares.mean(0)
    # Total variation distance: half of the sum of absolute differences.
    distances = np.abs(shares - mean).sum(1) / 2
    return Diagnostics(
        label_mass=float(np.mean([each.label_mass for each in orders])),
        argmax_is_label=all(each.argmax_is_label for each in orders),
        probabilities=mean.tolist(),
        order_sensitivity=float(distances.max()),
        orders=list(orders),
        read=read,
    )


def answer(question: Question, diagnostics: Diagnostics, scaling: Scaling, min_label_mass: float) -> Answer:
    """The answer, by the mean shares p of the options, calibrated, and the label mass m.

    A predicate's probability is p(true); a choice is argmax p; a score is sum of i p(i) over the levels' indices i;
    the confidence of both is max p times m. Below `min_label_mass` it is a Refusal.
    """
    name, mass = question.name, diagnostics.label_mass
    if mass < min_label_mass:
        return Refusal(name, diagnostics)
    shares = scaling.apply(np.asarray(diagnostics.probabilities), [option.key for option in question.options])
    if question.type == "predicate":
        return PredicateAnswer(name, float(shares[0]), diagnostics)
    best = int(shares.argmax())
    confidence = float(shares[best]) * mass
    is_score = question.type == "score"
    probabilities = [
        OptionProbability(option.value, share, option.text if is_score else None)
        for option, share in zip(question.options, shares.tolist(), strict=True)
    ]
    if is_score:
        return ScoreAnswer(name, float(shares @ np.arange(len(shares))), confidence, probabilities, diagnostics)
    value = question.options[best].value
    assert isinstance(value, (str, bool))
    return ChoiceAnswer(name, value, confidence, probabilities, diagnostics)
