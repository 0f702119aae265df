"""LLM.score_labels through the whole engine, against transformers; and what it computes."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
from byte_tokenizer import VOCAB_SIZE, byte_ids, make_byte_tokenizer
from models_util import ARCHITECTURES, make_random_model, random_prompts
from tiny_llm import is_empty, make_tiny_llm

from vllm import LLM, LabelScores, SamplingParams
from vllm.exceptions import VLLMValidationError
from vllm.loader import NO_EMBEDDED_MODEL, embedded_model_path

TOLERANCE = 1e-3
# Shared beginnings, a label that begins others, one token and many tokens, in no order.
TEXTS = [" the stop", "x", " the", " the cat sat on", " the cat", "zebra", " the cat sat off", "zeb"]
LENGTHS = (1, 16, 5, 37, 32, 50, 33)


@torch.no_grad()
def assert_exact(model, scores: LabelScores, labels: list[list[int]]) -> None:
    """Each label's readings are transformers' for the prompt and the label in one sequence."""
    prompt = scores.prompt_token_ids
    assert [each.token_ids for each in scores.labels] == labels
    totals = []
    for own, label in zip(scores.labels, labels, strict=True):
        logits = model(torch.tensor([prompt + label])).logits[0, len(prompt) - 1 : -1].double()
        expected = logits.log_softmax(-1).gather(1, torch.tensor(label)[:, None])[:, 0]
        totals.append(float(expected.sum()))
        assert own.token_logprobs == pytest.approx(expected.tolist(), abs=TOLERANCE)
        read = logits.gather(1, torch.tensor(label)[:, None])[:, 0]
        assert own.token_logits == pytest.approx(read.tolist(), abs=TOLERANCE)
        assert own.logprob == pytest.approx(totals[-1], abs=TOLERANCE)
        assert own.normalized_logprob == pytest.approx(totals[-1] / len(label), abs=TOLERANCE)
        for row, token, rank in zip(logits, label, own.token_ranks, strict=True):
            assert 1 + (row > row[token] + 1e-5).sum() <= rank <= (row >= row[token] - 1e-5).sum()
    assert scores.best is scores.labels[int(np.argmax(totals))]
    np.testing.assert_allclose(scores.probabilities, np.exp(totals) / np.exp(totals).sum(), atol=TOLERANCE)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    """A folder with a tokenizer, and the transformers model."""
    folder = tmp_path_factory.mktemp("tiny")
    _, model = make_random_model("llama", "small", folder, vocab_size=VOCAB_SIZE)
    make_byte_tokenizer(folder)
    return folder, model


@pytest.fixture(scope="module")
def llm(tiny):
    return make_tiny_llm(tiny[0])


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_random_models(arch, tmp_path):
    folder, model = make_random_model(arch, "odd", tmp_path)
    llm = LLM(str(folder), dtype="float32", skip_tokenizer_init=True)
    labels = [[7], [7, 8, 9], [7, 8, 1], [5, 5, 5, 5], [400, 3], [400, 2], [2]]
    for scores in llm.score_labels(random_prompts(model.config.vocab_size, LENGTHS), labels, use_tqdm=False):
        assert_exact(model, scores, labels)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"enable_prefix_caching": False},
        {"max_num_batched_tokens": 8},
        {"max_num_batched_tokens": 8, "enable_prefix_caching": False, "max_num_seqs": 2},
        {"num_gpu_blocks_override": 9},
    ],
)
def test_every_way_of_scheduling(tiny, options):
    folder, model = tiny
    llm = make_tiny_llm(folder, **options)
    prompts = random_prompts(VOCAB_SIZE, LENGTHS)
    labels = [llm.llm_engine.tokenizer.encode(text, add_special_tokens=False) for text in TEXTS]
    cold = llm.score_labels(prompts, TEXTS, use_tqdm=False)
    warm = llm.score_labels(prompts, TEXTS, use_tqdm=False)
    for prompt, scores, again in zip(prompts, cold, warm, strict=True):
        assert scores.prompt_token_ids == prompt and scores.prompt is None
        assert [each.label for each in scores.labels] == TEXTS
        assert_exact(model, scores, labels)
        np.testing.assert_allclose(scores.logprobs, again.logprobs, rtol=0, atol=1e-5)
    assert is_empty(llm)


def test_three_hundred_labels(tiny, llm):
    generator = random.Random(0)
    labels = [[token] for token in range(VOCAB_SIZE)]
    labels += [[generator.randrange(VOCAB_SIZE) for _ in range(generator.randint(2, 4))] for _ in range(40)]
    assert len(labels) > 300 and llm.llm_engine.model_config.max_logprob_token_ids < VOCAB_SIZE
    (scores,) = llm.score_labels([5, 6, 7], labels, use_tqdm=False)
    assert_exact(tiny[1], scores, labels)
    # All tokens are labels, so that everything begins with one.
    assert scores.mass == pytest.approx(1.0, abs=1e-5)


def test_the_caps_on_readings_are_for_users_alone(tiny):
    llm = make_tiny_llm(tiny[0], max_logprobs=0, max_logprob_token_ids=1)
    labels = [[3, 4], [3, 5], [6]]
    (scores,) = llm.score_labels([[5, 6, 7]], labels, use_tqdm=False)
    assert_exact(tiny[1], scores, labels)


def scheduled_tokens(llm: LLM, call) -> tuple[int, int]:
    """(tokens that the model computed, requests) of a call."""
    core, totals = llm.llm_engine.engine_core, []
    execute = core.executor.execute_model
    core.executor.execute_model = lambda step: (
        totals.append((step.total_num_scheduled_tokens, len(step.scheduled_new_reqs))) or execute(step)
    )
    try:
        call()
    finally:
        core.executor.execute_model = execute
    return sum(tokens for tokens, _ in totals), sum(count for _, count in totals)


@pytest.mark.parametrize("length", [64, 70])
def test_the_prompt_is_computed_once(tiny, length):
    llm = make_tiny_llm(tiny[0], device="cpu")
    (prompt,) = random_prompts(VOCAB_SIZE, (length,))
    labels = [[first, second] for first in range(10, 30) for second in (40, 41)]
    tokens, requests = scheduled_tokens(llm, lambda: llm.score_labels([prompt], labels, use_tqdm=False))
    # Each of the 20 branches appends one token to the prompt; the first computes it all.
    assert requests == 20
    assert tokens == (length + 1) + 19
    stats = llm.llm_engine.engine_core.scheduler.stats()
    assert stats.num_prefix_hit_tokens == 19 * length


def test_single_tokens_take_one_request(tiny):
    llm = make_tiny_llm(tiny[0], enable_prefix_caching=False)
    prompts = random_prompts(VOCAB_SIZE, (9, 20))
    call = scheduled_tokens(llm, lambda: llm.score_labels(prompts, ["a", "b", "c"], use_tqdm=False))
    assert call == (29, 2)


def test_prompts_of_every_kind(tiny, llm):
    ids = byte_ids("a cat")
    kinds = ["a cat", ids, np.array(ids), {"prompt": "a cat"}, {"prompt_token_ids": ids, "cache_salt": "mine"}]
    outputs = llm.score_labels(kinds, ["x", "yes"], use_tqdm=False)
    for output in outputs:
        assert output.prompt_token_ids == ids
        np.testing.assert_allclose(output.logprobs, outputs[0].logprobs, rtol=0, atol=1e-5)
    assert [output.prompt for output in outputs] == ["a cat", None, None, "a cat", None]
    (single,) = llm.score_labels("a cat", [ids[0]], use_tqdm=False)
    assert single.labels[0].label is None and single.labels[0].token_ids == ids[:1]
    assert llm.score_labels([], ["x"], use_tqdm=False) == []


def test_the_reading_of_a_single_token_is_generates_own(llm):
    params = SamplingParams(temperature=0, max_tokens=1, logprob_token_ids=[30, 31])
    (output,) = llm.generate(["a cat"], params, use_tqdm=False)
    (scores,) = llm.score_labels(["a cat"], [30, 31], use_tqdm=False)
    position = output.outputs[0].logprobs[0]
    assert scores.logprobs.tolist() == [position[30].logprob, position[31].logprob]
    assert scores.token_logits.tolist() == [position[30].logit, position[31].logit]
    assert [each.token_ranks for each in scores.labels] == [[position[30].rank], [position[31].rank]]
    assert scores.mass == pytest.approx(position.mass([30, 31]))


def test_a_logits_mode_of_the_engine_changes_nothing(tiny, llm):
    other = make_tiny_llm(tiny[0], logprobs_mode="raw_logits")
    labels = ["x", "the cat"]
    (expected,) = llm.score_labels(["a cat"], labels, use_tqdm=False)
    (scores,) = other.score_labels(["a cat"], labels, use_tqdm=False)
    np.testing.assert_array_equal(scores.logprobs, expected.logprobs)


def test_a_prompt_of_the_whole_context(tiny, llm):
    (prompt,) = random_prompts(VOCAB_SIZE, (128,))
    (scores,) = llm.score_labels([prompt], [[3], [4]], use_tqdm=False)
    assert_exact(tiny[1], scores, [[3], [4]])
    (scores,) = llm.score_labels([prompt[:125]], [[3, 4, 5, 6]], use_tqdm=False)
    assert_exact(tiny[1], scores, [[3, 4, 5, 6]])


@pytest.mark.parametrize(
    ("prompts", "labels", "message"),
    [
        (["a"], [], "labels must not be empty"),
        (["a"], ["x", "x"], "labels 'x' and 'x' are the same tokens"),
        (["a"], [VOCAB_SIZE], "labels must be in"),
        (["a", ""], ["x"], r"prompts\[1\]: a decoder prompt cannot be empty"),
        ([[5] * 129], ["x"], "129 tokens"),
        (["a", [5] * 126], ["xyz?"], r"prompts\[1\] has 126 tokens and label 'xyz\?' 4; .*max_model_len=128"),
        (5, ["x"], "prompts must be"),
    ],
)
def test_errors_leave_the_engine_as_it_was(llm, prompts, labels, message):
    with pytest.raises(VLLMValidationError, match=message):
        llm.score_labels(prompts, labels, use_tqdm=False)
    assert is_empty(llm)


def test_nan_logits_spoil_their_own_prompt_alone(tiny, monkeypatch):
    llm = make_tiny_llm(tiny[0], max_num_seqs=1)
    model = llm.llm_engine.engine_core.executor.worker.model_runner.model
    embed = model.model.embed_tokens.forward
    monkeypatch.setattr(
        model.model.embed_tokens, "forward", lambda ids: torch.where((ids == 99)[:, None], torch.nan, embed(ids))
    )
    labels = [[5, 6], [7, 8], [9]]
    bad, good = llm.score_labels([[3, 99, 4], [3, 98, 4]], labels, use_tqdm=False)
    assert "NaN" in bad.error and bad.best is None and np.isnan(bad.logprobs).all() and np.isnan(bad.token_logits).all()
    assert good.error is None
    assert_exact(tiny[1], good, labels)
    assert is_empty(llm)


@pytest.mark.skipif(embedded_model_path() is None, reason=NO_EMBEDDED_MODEL)
def test_the_embedded_model_on_a_real_prompt(embedded_reference):
    texts = [" happy", " not happy", " not at all happy", " very disappointed"]
    llm = LLM(dtype="float32", max_model_len=256)
    labels = [llm.llm_engine.tokenizer.encode(text, add_special_tokens=False) for text in texts]
    assert len({len(label) for label in labels}) == 3
    (scores,) = llm.score_labels("Review: It broke after a day.\nThe customer is", texts, use_tqdm=False)
    assert_exact(embedded_reference, scores, labels)
