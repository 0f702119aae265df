"""The answers that scoring endpoints must give, by transformers and arithmetic."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import pytest
import torch

TOLERANCE = 1e-3


@dataclass(frozen=True)
class Expected:
    """One label after one prompt."""

    token_logprobs: list[float]
    logit: float
    ranks: list[tuple[int, int]]  # lowest and highest that rounding allows, a token

    @property
    def logprob(self) -> float:
        return sum(self.token_logprobs)


@torch.no_grad()
def expected_label(model: Any, prompt: list[int], label: list[int]) -> Expected:
    """The readings of `label` after `prompt`, from one forward pass of both."""
    logits = model(torch.tensor([prompt + label])).logits[0, len(prompt) - 1 : -1].double()
    own = logits.gather(1, torch.tensor(label)[:, None])
    logprobs = (own - logits.logsumexp(-1, keepdim=True))[:, 0]
    ranks = [
        (int(1 + (row > value + 1e-5).sum()), int((row >= value - 1e-5).sum()))
        for row, value in zip(logits, own, strict=True)
    ]
    return Expected(logprobs.tolist(), float(own[0]), ranks)


def assert_item(model: Any, item: dict[str, Any], prompt: list[int], labels: list[list[int]], softmax: bool) -> None:
    """An entry of the answer's `data` is what `model` gives for `prompt` and `labels`."""
    expected = [expected_label(model, prompt, label) for label in labels]
    logprobs = [each.logprob for each in expected]
    total = sum(map(math.exp, logprobs))
    shares = [math.exp(each) / (total if softmax and len(labels) > 1 else 1) for each in logprobs]
    assert item["object"] == "score"
    assert item["num_prompt_tokens"] == len(prompt)
    assert [entry["token_ids"] for entry in item["labels"]] == labels
    assert [entry["logprob"] for entry in item["labels"]] == pytest.approx(logprobs, abs=TOLERANCE)
    assert [entry["logit"] for entry in item["labels"]] == pytest.approx([e.logit for e in expected], abs=TOLERANCE)
    assert [entry["probability"] for entry in item["labels"]] == pytest.approx(shares, rel=2e-3, abs=1e-9)
    assert item["score"] == item["labels"][0]["probability"]
    best = max(range(len(labels)), key=logprobs.__getitem__)
    assert item["prediction"] == item["labels"][best]["label"]
    beginnings = [any(other == label[: len(other)] for other in labels if len(other) < len(label)) for label in labels]
    mass = sum(math.exp(value) for value, begins in zip(logprobs, beginnings, strict=True) if not begins)
    assert item["label_mass"] == pytest.approx(mass, rel=2e-3)
    for entry, own in zip(item["labels"], expected, strict=True):
        assert_ranks([entry["rank"]], own.ranks[:1])
        if max(map(len, labels)) > 1:
            assert entry["token_logprobs"] == pytest.approx(own.token_logprobs, abs=TOLERANCE)
            assert entry["normalized_logprob"] == pytest.approx(own.logprob / len(own.ranks), abs=TOLERANCE)
            assert_ranks(entry["token_ranks"], own.ranks)
    assert item["argmax_is_label"] == (1 in [entry["rank"] for entry in item["labels"]])


def assert_ranks(ranks: list[int], bounds: list[tuple[int, int]]) -> None:
    assert len(ranks) == len(bounds)
    assert all(low <= rank <= high for rank, (low, high) in zip(ranks, bounds, strict=True))
