"""Prompt positions read through the head's weight say what those read from its logits say."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from vllm.ops._dispatch import force
from vllm.sampling_params import SamplingParams
from vllm.v1.worker.gpu.sample.prompt_logprob import PromptLogprobsState, PromptReadings, PromptRows
from vllm.v1.worker.gpu.states import RequestStates

VOCAB, HIDDEN = 300, 32
PROMPTS = {"a": [5, 6, 7, 299], "b": [1, 0, 8]}


class Head:
    """Its logits are exact: sums of small integers."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(0)
        self.weight = torch.randint(-2, 3, (VOCAB, HIDDEN), generator=generator).to(torch.bfloat16)
        self.hidden = torch.randint(-2, 3, (8, HIDDEN), generator=generator).to(torch.bfloat16)
        self.num_calls = 0

    def __call__(self, hidden: torch.Tensor, slots: np.ndarray) -> torch.Tensor:
        self.num_calls += 1
        return hidden.float() @ self.weight.float().t()


def read(head: Head, params: dict[str, dict[str, Any]], weight: torch.Tensor | None) -> PromptReadings:
    states = RequestStates(4, 16, torch.device("cpu"))
    state = PromptLogprobsState(4, VOCAB)
    slots: list[int] = []
    positions: list[int] = []
    for name, prompt in PROMPTS.items():
        slot = states.add_request(name, prompt, len(prompt), 0)
        state.add_request(slot, name, SamplingParams(**params[name]), len(prompt), 0)
        slots += [slot] * (len(prompt) - 1)
        positions += range(len(prompt) - 1)
    rows = PromptRows(np.array(slots), np.array(positions), np.arange(len(slots))[::-1].copy())
    readings = PromptReadings()
    with force("triton"):
        state.read(head.hidden, rows, head, weight, states, readings)
    readings.take()
    return readings


def plain(readings: PromptReadings) -> dict[str, list[tuple[Any, ...]]]:
    """By request, each run of rows: its ids, logprobs (rounded, as sums in another order differ), logits, ranks."""
    found = {}
    for name, runs in readings.rows.items():
        found[name] = [
            (
                run.lists.token_ids[run.rows].tolist(),
                run.lists.logprobs[run.rows].round(4).tolist(),
                run.lists.logits[run.rows].tolist(),
                run.lists.ranks[run.rows].tolist(),
                run.num_token_ids,
            )
            for run in runs
        ]
    return found


@pytest.mark.parametrize(
    "params",
    [
        {"a": dict(prompt_logprobs=0), "b": dict(prompt_logprobs=0)},
        {"a": dict(prompt_logprob_token_ids=[3, 200]), "b": dict(prompt_logprob_token_ids=[9])},
    ],
    ids=["tokens", "ids"],
)
def test_chosen_tokens_need_no_logits(params: dict[str, dict[str, Any]]) -> None:
    head = Head()
    wanted = plain(read(head, params, None))
    assert head.num_calls == 1
    got = plain(read(head, params, head.weight))
    assert head.num_calls == 1
    assert got == wanted and sorted(got) == ["a", "b"]


@pytest.mark.parametrize("more", [dict(prompt_logprobs=2), dict(prompt_logprobs=0, logprob_entropy=True)], ids=str)
def test_what_takes_the_whole_row_is_read_from_logits(more: dict[str, Any]) -> None:
    head = Head()
    read(head, {"a": more, "b": dict(prompt_logprobs=0)}, head.weight)
    assert head.num_calls >= 1


def test_hidden_states_that_are_not_finite_are_reported() -> None:
    head = Head()
    head.hidden[0] = torch.nan
    params = {"a": dict(prompt_logprobs=0), "b": dict(prompt_logprobs=0)}
    # Row 0 is the last position's.
    assert read(head, params, head.weight).non_finite == {"b"}
