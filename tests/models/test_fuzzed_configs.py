"""Random configurations of every native architecture: transformers' logits, or a refusal (support/fuzz_architectures.py
has the generator, and runs more of them)."""

from __future__ import annotations

import random

import pytest
import torch
from architectures import ARCHITECTURES
from fuzz_architectures import make_trial, run_trial

MOST_TRIALS = 4
"""Some configurations are refused by design, and some transformers cannot build."""


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_a_configuration_has_transformers_logits_or_is_refused(name: str) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    results = []
    for number in range(MOST_TRIALS):
        rng = random.Random(f"{name} {number}")
        trial = make_trial(name, rng)
        results.append((run_trial(name, trial, rng), trial.changes))
        if results[-1][0] == "equal":
            break
    torch.set_num_threads(before)
    assert [each for each in results if each[0].startswith(("DIFFERS", "FAILS"))] == []
    assert any(result == "equal" for result, _ in results), results
