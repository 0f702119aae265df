"""What transformers says a reading should be, and the comparison with what the engine returned."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from vllm import SamplingParams
from vllm.outputs import RequestOutput

LOGPROB_TOLERANCE = 1e-4
# Float32 sums in another order move a logit by about this much; closer neighbours may change places.
TIE_DISTANCE = 1e-5


@torch.no_grad()
def reference_logits(model: Any, output: RequestOutput) -> np.ndarray:
    """Float64 logits [P, V] at the generated positions of the request's first sequence."""
    generated = output.outputs[0].token_ids
    tokens = [*output.prompt_token_ids, *generated]
    logits = model(torch.tensor([tokens])).logits[0].double().numpy()
    return logits[len(output.prompt_token_ids) - 1 : -1][: len(generated)]


def assert_matches(output: RequestOutput, params: SamplingParams, logits: np.ndarray) -> None:
    """Every entry that was asked for is there, in its place, with the right logit, logprob and rank."""
    completion = output.outputs[0]
    readings = completion.logprobs
    assert len(readings) == len(completion.token_ids) == len(logits)
    for position, row in enumerate(logits):
        entries = readings[position]
        shifted = row - row.max()
        lse = row.max() + np.log(np.exp(shifted).sum())
        for token_id, entry in entries.items():
            assert abs(entry.logprob - (row[token_id] - lse)) < LOGPROB_TOLERANCE, (position, token_id)
            assert abs(entry.logit - row[token_id]) < LOGPROB_TOLERANCE, (position, token_id)
            others = np.delete(row, token_id)
            best = 1 + int((others > row[token_id] + TIE_DISTANCE).sum())
            worst = 1 + int((others > row[token_id] - TIE_DISTANCE).sum())
            assert best <= entry.rank <= worst, (position, token_id, entry.rank, best, worst)
        assert next(iter(entries)) == completion.token_ids[position]
        asked = list(params.logprob_token_ids or [])
        assert set(asked) <= set(entries)
        num_topk = len(row) if params.logprobs == -1 else (params.logprobs or 0)
        ranked = sorted(entries, key=lambda token_id: entries[token_id].rank)[:num_topk]
        threshold = np.sort(row)[::-1][num_topk - 1] if num_topk else np.inf
        assert all(row[token_id] >= threshold - TIE_DISTANCE for token_id in ranked)
        assert len(entries) <= 1 + num_topk + len(asked)


def assert_same_prompts(one: Sequence[Any], other: Sequence[Any], device: str) -> None:
    """Two runs read the same from a prompt: every bit on the CPU, where a row does not depend on its batch; elsewhere
    all but the last bits of a logprob."""
    if device == "cpu":
        assert one == other
        return
    for first, second in zip(one, other, strict=True):
        assert (first is None) == (second is None)
        if first is not None:
            assert list(first) == list(second)
            for token, entry in first.items():
                assert entry.rank == second[token].rank
                assert abs(entry.logprob - second[token].logprob) < 1e-5


def assert_same_readings(one: RequestOutput, other: RequestOutput, tolerance: float) -> None:
    """Two runs of one request agree: tokens, entries, ranks exactly; logprobs within `tolerance`."""
    first, second = one.outputs[0], other.outputs[0]
    assert first.token_ids == second.token_ids
    assert first.text == second.text
    assert first.finish_reason == second.finish_reason
    if first.logprobs is None:
        assert second.logprobs is None
        return
    np.testing.assert_array_equal(first.logprobs.token_ids, second.logprobs.token_ids)
    np.testing.assert_array_equal(first.logprobs.end_indices, second.logprobs.end_indices)
    np.testing.assert_array_equal(first.logprobs.ranks, second.logprobs.ranks)
    np.testing.assert_allclose(first.logprobs.logprobs, second.logprobs.logprobs, rtol=0, atol=tolerance)
    np.testing.assert_allclose(first.logprobs.logits, second.logprobs.logits, rtol=0, atol=tolerance)
