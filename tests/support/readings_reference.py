"""The readings that transformers expects, and their comparison with the engine's."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from vllm import LLM, SamplingParams
from vllm.outputs import RequestOutput

LOGPROB_TOLERANCE = 1e-4
# Float32 sums in another order move a logit by about this much; closer neighbours may change places.
TIE_DISTANCE = 1e-5


@torch.no_grad()
def reference_logits(model: Any, output: RequestOutput) -> np.ndarray:
    """Float64 logits [P, V] at the generated positions of the request's first sequence."""
    generated = output.outputs[0].token_ids
    tokens = [*output.prompt_token_ids, *generated]
    logits = model(torch.tensor([tokens])).logits[0, len(output.prompt_token_ids) - 1 : -1]
    return logits[: len(generated)].double().numpy()


def own_logits(llm: LLM, outputs: Sequence[RequestOutput]) -> list[np.ndarray]:
    """Our logits [P, V] at those positions, whole rows, float64; `llm` takes max_logprobs=-1. One for each request."""
    rows = []
    for output in outputs:
        generated = output.outputs[0].token_ids
        start = len(output.prompt_token_ids) - 1
        params = SamplingParams(max_tokens=0, prompt_logprobs=-1, prompt_logprob_start=start)
        (read,) = llm.generate([[*output.prompt_token_ids, *generated]], params, use_tqdm=False)
        vocab_size = llm.llm_engine.vllm_config.model_config.vocab_size
        rows.append(read.prompt_logprobs.select(range(vocab_size)).logits.astype(np.float64)[-len(generated) :])
    return rows


def assert_matches(output: RequestOutput, params: SamplingParams, logits: np.ndarray, own: np.ndarray) -> None:
    """Every entry that was asked for is there, in its place, with the right logit, logprob and rank.

    Args:
        logits: see reference_logits.
        own: see own_logits. How far apart the two models are is what two neighbours of a rank may be, and change
            places.
    """
    completion = output.outputs[0]
    readings = completion.logprobs
    assert len(readings) == len(completion.token_ids) == len(logits) == len(own)
    for position, (row, own_row) in enumerate(zip(logits, own, strict=True)):
        entries = readings[position]
        shifted = row - row.max()
        lse = row.max() + np.log(np.exp(shifted).sum())
        difference = np.abs(own_row - row).max()
        for token_id, entry in entries.items():
            assert abs(entry.logprob - (row[token_id] - lse)) < LOGPROB_TOLERANCE, (position, token_id)
            difference = max(difference, abs(entry.logit - row[token_id]))
        assert difference < LOGPROB_TOLERANCE, position
        for token_id, entry in entries.items():
            best, worst = rank_window(row, token_id, 2 * difference)
            assert best <= entry.rank <= worst, (position, token_id, entry.rank, best, worst)
        assert next(iter(entries)) == completion.token_ids[position]
        asked = list(params.logprob_token_ids or [])
        assert set(asked) <= set(entries)
        num_topk = len(row) if params.logprobs == -1 else (params.logprobs or 0)
        ranked = sorted(entries, key=lambda token_id: entries[token_id].rank)[:num_topk]
        threshold = np.sort(row)[::-1][num_topk - 1] if num_topk else np.inf
        assert all(row[token_id] >= threshold - 2 * difference for token_id in ranked)
        assert len(entries) <= 1 + num_topk + len(asked)


def rank_window(row: np.ndarray, token_id: int, distance: float) -> tuple[int, int]:
    """The best and the worst rank that a token of a row [V] can have if differences of its logits are off by up to
    `distance`."""
    others = np.delete(row, token_id)
    best, worst = ((others > row[token_id] + offset).sum() for offset in (distance, -distance))
    return 1 + int(best), 1 + int(worst)


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
