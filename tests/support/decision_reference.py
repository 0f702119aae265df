"""The answer that a decision must give, by transformers' logits after the prompts and the labels that it reports."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

TOLERANCE = 1e-4
"""The tolerance of probabilities; both sides compute in float32."""


@torch.no_grad()
def label_logprobs(model: Any, prompt: list[int], labels: list[list[int]]) -> tuple[list[float], list[int]]:
    """Log of the probability that each label continues the prompt, and its first token's rank."""
    begun = model(torch.tensor([prompt]), use_cache=True, logits_to_keep=1)
    first = begun.logits[0, -1].double().log_softmax(-1)
    logprobs = [float(first[label[0]]) for label in labels]
    longest = max(len(label) for label in labels)
    if longest > 1:
        # Padding after a label's end changes nothing before it.
        rows = torch.tensor([(label + [0] * longest)[: longest - 1] for label in labels])
        begun.past_key_values.batch_repeat_interleave(len(labels))
        logits = model(rows, past_key_values=begun.past_key_values).logits.double().log_softmax(-1)
        for index, label in enumerate(labels):
            logprobs[index] += sum(float(logits[index, at, token]) for at, token in enumerate(label[1:]))
    return logprobs, [1 + int((first > first[label[0]]).sum()) for label in labels]


def softmax(logprobs: list[float]) -> list[float]:
    weights = [math.exp(each - max(logprobs)) for each in logprobs]
    return [each / sum(weights) for each in weights]


def assert_answer(model: Any, question: dict[str, Any], answer: dict[str, Any]) -> None:
    """An answer with diagnostics and token ids, in the shape of /v1/decisions, without calibration."""
    diagnostics = answer["diagnostics"]
    shares, masses = [], []
    for order in diagnostics.get("orders", [diagnostics]):
        labels = [option["label_token_ids"] for option in order["options"]]
        logprobs, ranks = label_logprobs(model, order["prompt_token_ids"], labels)
        assert [option["logprob"] for option in order["options"]] == pytest.approx(logprobs, abs=1e-3)
        # Rounding may swap neighbours.
        assert [option["rank"] for option in order["options"]] == pytest.approx(ranks, abs=3, rel=0.01)
        shares.append(softmax(logprobs))
        begun = [any(a != b and b[: len(a)] == a for a in labels) for b in labels]
        masses.append(sum(math.exp(each) for each, is_begun in zip(logprobs, begun, strict=True) if not is_begun))
        if "orders" in diagnostics:
            assert order["label_mass"] == pytest.approx(masses[-1], abs=TOLERANCE)
    mean = [sum(own) / len(shares) for own in zip(*shares, strict=True)]
    mass = sum(masses) / len(masses)
    assert diagnostics["label_mass"] == pytest.approx(mass, abs=TOLERANCE)
    assert (answer["type"], answer["name"]) == (question["type"], question.get("name"))
    if question["type"] == "predicate":
        assert answer["probability"] == pytest.approx(mean[0], abs=TOLERANCE)
        return
    assert [each["probability"] for each in answer["probabilities"]] == pytest.approx(mean, abs=TOLERANCE)
    assert answer["confidence"] == pytest.approx(max(mean) * mass, abs=TOLERANCE)
    if question["type"] == "choice":
        values = [choice["value"] for choice in question["choices"]]
        assert [(type(each["value"]), each["value"]) for each in answer["probabilities"]] == [
            (type(value), value) for value in values
        ]
        found = max(answer["probabilities"], key=lambda each: each["probability"])["value"]
        assert answer["choice"] is found or answer["choice"] == found
    else:
        assert [(each["value"], each["label"]) for each in answer["probabilities"]] == list(
            enumerate(level["label"] for level in question["levels"])
        )
        assert answer["score"] == pytest.approx(sum(index * share for index, share in enumerate(mean)), abs=1e-3)
