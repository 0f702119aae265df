"""The sampler's readings for beam searches, and rows of which nothing is drawn."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from memory_group import run_ranks
from sampling_harness import VOCAB, Harness, random_logits, reading

from vllm.distributed.communicator import ALONE, Communicator
from vllm.sampling_params import SamplingParams
from vllm.v1.worker.gpu.sample.output import SamplerOutput

PROMPT, BEAM = [3, 4, 5], [10, 11]
ALLOWED = [150, 2, 60, 61, 9]
ROWS: list[dict[str, Any]] = [
    {"allowed_token_ids": ALLOWED, "logprobs": 3},
    {"allowed_token_ids": ALLOWED, "logprobs": 12},
    {"logit_bias": {150: 30.0, 4: -100.0, 10: 1.5}, "logprobs": 5},
    {"logit_bias": {150: 30.0}, "temperature": 0.5, "logprobs": 4},
    {"temperature": 2.5, "logprobs": 6},
    {"allowed_token_ids": ALLOWED, "temperature": 2.0, "logprobs": 2, "logprobs_mode": "processed_logprobs"},
    {"allowed_token_ids": ALLOWED, "logprobs": 4, "logprobs_mode": "processed_logprobs"},
    {"logprobs": 4},
]


def params_of(fields: dict[str, Any]) -> SamplingParams:
    params = SamplingParams(**{"temperature": 0, "max_tokens": 0, **fields})
    params._beam_length = len(BEAM)
    return params


def run(logits: torch.Tensor, group: Communicator = ALONE) -> SamplerOutput:
    """A row of each kind, between requests of other kinds."""
    harness = Harness(group=group)
    slots = []
    for fields in ROWS:
        slots += [harness.add(params_of(fields), PROMPT, BEAM), harness.add(SamplingParams(seed=1, logprobs=1))]
    return harness.step(logits, slots)


def expected(row: torch.Tensor, fields: dict[str, Any]) -> dict[str, np.ndarray]:
    """By float64: ids by score, their scores, and their readings in the mode."""
    x, temperature = row.double().numpy(), fields.get("temperature", 0) or 1.0
    changed = x.copy()
    for token_id, bias in fields.get("logit_bias", {}).items():
        changed[token_id] += bias
    allowed = fields.get("allowed_token_ids", range(VOCAB))
    changed[[each for each in range(VOCAB) if each not in allowed]] = -np.inf
    changed /= temperature
    ids = np.argsort(-changed, kind="stable")[: min(fields["logprobs"], len(allowed))]
    is_processed = fields.get("logprobs_mode", "").startswith("processed")
    read = changed if is_processed else x
    return {
        "token_ids": ids,
        "scores": changed[ids] - np.log(np.exp(x / temperature).sum()),
        "logprobs": read[ids] - np.log(np.exp(read).sum()),
        "logits": read[ids],
        "ranks": np.array([1 + (read > read[each]).sum() for each in ids]),
    }


def scores_of(output: SamplerOutput, row: int) -> np.ndarray | None:
    for rows, tensors in output.beam_scores:
        if row in rows:
            return tensors.logprobs[list(rows).index(row), 1:].numpy()
    return None


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_candidates_and_their_scores(dtype: torch.dtype) -> None:
    logits = random_logits(2 * len(ROWS), seed=3).to(dtype)
    output = run(logits)
    assert output.errors() == {}
    for number, fields in enumerate(ROWS):
        row = 2 * number
        wanted, read = expected(logits[row], fields), reading(output, row, fields["logprobs"], 0)
        scores = scores_of(output, row)
        count = len(wanted["token_ids"])
        assert read is not None
        if number == len(ROWS) - 1:
            assert scores is None, "of an unchanged row they are the logprobs"
            scores = read["logprobs"][1:]
        assert scores is not None
        np.testing.assert_array_equal(read["token_ids"][1:][:count], wanted["token_ids"])
        np.testing.assert_array_equal(read["ranks"][1:][:count], wanted["ranks"])
        for name in ("logprobs", "logits"):
            np.testing.assert_allclose(read[name][1:][:count], wanted[name], rtol=0, atol=2e-5, err_msg=str(fields))
        np.testing.assert_allclose(scores[:count], wanted["scores"], rtol=0, atol=2e-5, err_msg=str(fields))
        assert np.isneginf(scores[count : fields["logprobs"]]).all()


@pytest.mark.parametrize("world_size", [2, 3])
def test_ranks_that_share_the_vocabulary_read_the_same(world_size: int) -> None:
    logits = random_logits(2 * len(ROWS), seed=4)
    whole = run(logits)
    for part in run_ranks(world_size, lambda group: run(logits, group)):
        assert part.errors() == {}
        for number, fields in enumerate(ROWS):
            count = len(expected(logits[2 * number], fields)["token_ids"])
            mine, own = (reading(each, 2 * number, count, 0) for each in (part, whole))
            assert mine is not None and own is not None
            for name in ("token_ids", "ranks", "logits"):
                np.testing.assert_array_equal(mine[name][1:], own[name][1:])
            np.testing.assert_allclose(mine["logprobs"][1:], own["logprobs"][1:], rtol=0, atol=2e-6)
            mine_scores, own_scores = (scores_of(each, 2 * number) for each in (part, whole))
            if own_scores is not None and mine_scores is not None:
                np.testing.assert_allclose(mine_scores[:count], own_scores[:count], rtol=2e-7, atol=2e-6)
            assert (mine_scores is None) == (own_scores is None)


def test_a_beam_counts_as_generated() -> None:
    """bad_words, min_tokens and processors see it as the output."""
    seen = []

    def note(prompt_ids: list[int], output_ids: list[int], logits: torch.Tensor) -> torch.Tensor:
        seen.append((list(prompt_ids), list(output_ids)))
        return logits

    harness = Harness()
    params = params_of({"logprobs": VOCAB, "logits_processors": [note]})
    params.min_tokens, params.bad_words_token_ids = 3, [[11, 20], [5, 10, 11, 21], [22, 23]]
    scores = scores_of(harness.step(random_logits(1), [harness.add(params, PROMPT, BEAM)]), 0)
    assert seen == [(PROMPT, BEAM)] and scores is not None
    assert np.isneginf(scores).sum() == 3, "both end tokens, and what completes the first word"


NOTHING: dict[str, Any] = {"allowed_token_ids": [2, 7], "min_tokens": 1}


class TestNothingIsDrawn:
    @staticmethod
    def step(fields: dict[str, Any], beam: bool = False, samples: bool = False) -> SamplerOutput:
        harness = Harness()
        params = SamplingParams(**{"temperature": 0, "logprobs": 3, **fields})
        params._beam_length = 0 if beam else None
        slots = [harness.add(params), harness.add(SamplingParams(temperature=0))]
        harness.states.samples[slots[0]] = samples
        return harness.step(random_logits(2, seed=9), slots)

    def test_a_raw_reading_needs_no_token(self) -> None:
        output, plain = self.step(NOTHING), self.step({})
        assert output.errors() == {}
        mine, own = reading(output, 0, 3, 0), reading(plain, 0, 3, 0)
        assert mine is not None and own is not None
        for name in ("token_ids", "ranks", "logits"):
            np.testing.assert_array_equal(mine[name][1:], own[name][1:])

    def test_nor_do_beams_and_given_continuations(self) -> None:
        output = self.step(NOTHING, beam=True)
        assert output.errors() == {}
        scores = scores_of(output, 0)
        assert scores is not None and np.isneginf(scores).all()
        assert self.step({"trace_decode_token_ids": [5], **NOTHING}, samples=True).errors() == {}

    def test_a_processed_reading_does(self) -> None:
        processed = {"logprobs_mode": "processed_logprobs", **NOTHING}
        assert list(self.step(processed).errors()) == [0]
        assert list(self.step(NOTHING, samples=True).errors()) == [0]
