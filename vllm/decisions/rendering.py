"""Decisions as JSON."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from vllm.decisions.types import (
    Answer,
    ChoiceAnswer,
    Decision,
    DecisionUsage,
    Diagnostics,
    OrderReading,
    PredicateAnswer,
    ScoreAnswer,
)


def decision_fields(decision: Decision, with_diagnostics: bool, with_ids: bool) -> dict[str, Any]:
    """`answers` and `usage` of /v1/decisions."""
    answers = [answer_fields(each, with_diagnostics, with_ids) for each in decision.answers]
    return {"answers": answers, "usage": usage_fields(decision.usage)}


def answer_fields(answer: Answer, with_diagnostics: bool = False, with_ids: bool = False) -> dict[str, Any]:
    """An answer as OpenAI's SDK reads it. With several orders their sensitivity is there without being asked for."""
    own = {name: getattr(answer, name) for name in ("type", "name")}
    for name in ("probability", "choice", "score", "confidence"):
        if hasattr(answer, name):
            own[name] = getattr(answer, name)
    if hasattr(answer, "probabilities"):
        shares = [asdict(each) for each in answer.probabilities]
        own["probabilities"] = [{key: value for key, value in each.items() if value is not None} for each in shares]
    if with_diagnostics or with_ids:
        own["diagnostics"] = diagnostics_fields(answer.diagnostics, with_ids)
    elif len(answer.diagnostics.orders) > 1:
        own["diagnostics"] = {"order_sensitivity": answer.diagnostics.order_sensitivity}
    return own


def systemone_fields(decision: Decision) -> dict[str, Any]:
    """`answers`, `usage` and `diagnostics` of /v1/systemone, by the questions' ids."""
    answers, diagnostics = {}, {}
    for each in decision.answers:
        assert each.name is not None
        own = each.diagnostics
        answers[each.name] = _result(each)
        diagnostics[each.name] = {"label_mass": own.label_mass, "argmax_is_label": own.argmax_is_label}
    usage = {"input_tokens": decision.usage.input_tokens, "output_tokens": decision.usage.output_tokens}
    return {"answers": answers, "usage": usage, "diagnostics": diagnostics}


def _result(answer: Answer) -> dict[str, Any]:
    if isinstance(answer, PredicateAnswer):
        yes = answer.probability
        return {
            "type": "noul",
            "noul": yes,
            "probabilities": {"yes": yes, "no": 1 - yes},
            "confidence": max(yes, 1 - yes) * answer.diagnostics.label_mass,
        }
    assert isinstance(answer, (ChoiceAnswer, ScoreAnswer))
    shares = {str(each.value): each.probability for each in answer.probabilities}
    own: dict[str, Any] = {"type": answer.type, "probabilities": shares, "confidence": answer.confidence}
    if isinstance(answer, ChoiceAnswer):
        return {**own, "choice": answer.choice}
    legend = {str(each.value): each.label for each in answer.probabilities}
    return {**own, "score": answer.score, "legend": legend}


def diagnostics_fields(diagnostics: Diagnostics, with_ids: bool) -> dict[str, Any]:
    """The first order's readings, and all orders' if there are several."""
    orders = [_order_fields(each, with_ids) for each in diagnostics.orders]
    over_all = {name: getattr(diagnostics, name) for name in ("read", "label_mass", "argmax_is_label")}
    own = {**orders[0], **over_all}
    return own if len(orders) == 1 else {**own, "order_sensitivity": diagnostics.order_sensitivity, "orders": orders}


def usage_fields(usage: DecisionUsage) -> dict[str, Any]:
    """OpenAI's counts. What was not in the cache is there now."""
    details = {"cached_tokens": usage.cached_tokens, "cache_write_tokens": usage.input_tokens - usage.cached_tokens}
    return {
        "input_tokens": usage.input_tokens,
        "input_tokens_details": details,
        "output_tokens": usage.output_tokens,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": usage.input_tokens + usage.output_tokens,
    }


def _order_fields(reading: OrderReading, with_ids: bool) -> dict[str, Any]:
    fields: dict[str, Any] = {
        "order": reading.order,
        "label_mass": reading.label_mass,
        "argmax_is_label": reading.argmax_is_label,
        "lse": reading.lse,
        "options": [],
    }
    for each in reading.options:
        option = {name: getattr(each, name) for name in ("value", "label", "logprob", "rank", "probability")}
        if len(each.label_token_ids) > 1:
            option |= {"token_logprobs": each.token_logprobs, "token_ranks": each.token_ranks}
        if with_ids:
            option["label_token_ids"] = each.label_token_ids
        fields["options"].append(option)
    if with_ids:
        fields["prompt_token_ids"] = reading.prompt_token_ids
    return fields
