"""LLM.beam_search and generate(use_beam_search=True): the engine's searches against transformers', and what can happen
to them on the way."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from beam_search_reference import (
    EOS_IDS,
    RecordingBar,
    beam_params,
    contents,
    make_llm,
    make_model,
    transformers_search,
)
from byte_tokenizer import EOS
from models_util import random_prompts
from tiny_llm import is_empty, make_tiny_llm, make_tiny_model

from vllm import BeamSearchParams, SamplingParams
from vllm.exceptions import VLLMValidationError

# width, k, length_penalty, early_stopping, max_tokens
CASES = [
    (2, 1, 1.0, False, 12),
    (4, 4, 1.0, "never", 12),
    (4, 2, 0.0, True, 12),
    (5, 5, -1.0, False, 12),
    (5, 3, 2.0, "never", 12),
    (4, 4, 0.5, True, 1),
]


pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    return make_model("llama", tmp_path_factory.mktemp("llama"))


@pytest.fixture(scope="module")
def qwen2(tmp_path_factory):
    return make_model("qwen2", tmp_path_factory.mktemp("qwen2"))


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    return random_prompts(199, (1, 16, 5, 37))


def scores_of(completions: list[Any], length_penalty: float) -> list[float]:
    return [each.cumulative_logprob / len(each.token_ids) ** length_penalty for each in completions]


@pytest.mark.parametrize("arch", ["llama", "qwen2"])
def test_both_doors_equal_transformers(arch, prompts, request):
    folder, model = request.getfixturevalue(arch)
    llm = make_llm(folder)
    # All cases and prompts in one call: they run side by side.
    pairs = list(itertools.product(prompts, CASES))
    completed = llm.generate([prompt for prompt, _ in pairs], [beam_params(*case) for _, case in pairs], use_tqdm=False)
    own_params = [
        BeamSearchParams(width, max_tokens, length_penalty=penalty, early_stopping=early)
        for _, (width, _, penalty, early, max_tokens) in pairs
    ]
    found = llm.beam_search([prompt for prompt, _ in pairs], own_params, use_tqdm=False)
    limited = llm.beam_search([prompt for prompt, _ in pairs[:3]], own_params[:3], concurrency_limit=2, priority=0)
    assert [[each.tokens for each in beams.sequences] for beams in limited] == [
        [each.tokens for each in beams.sequences] for beams in found[:3]
    ]
    with pytest.raises(VLLMValidationError, match="concurrency_limit"):
        llm.beam_search([prompts[0]], own_params[0], concurrency_limit=0)
    lengths = set()
    for (prompt, case), output, beams in zip(pairs, completed, found, strict=True):
        width, k, length_penalty, early_stopping, max_tokens = case
        (expected,) = transformers_search(
            model, [prompt], width, EOS_IDS, max_new_tokens=max_tokens,
            length_penalty=length_penalty, early_stopping=early_stopping,
        )  # fmt: skip
        tokens, scores = [each for each, _ in expected], [score for _, score in expected]
        assert [each.token_ids for each in output.outputs] == tokens[:k]
        assert scores_of(output.outputs, length_penalty) == pytest.approx(scores[:k], abs=1e-4)
        assert [each.index for each in output.outputs] == list(range(k))
        assert output.prompt_token_ids == prompt and output.finished
        assert [each.tokens for each in beams.sequences] == [prompt + each for each in tokens]
        assert [each.score for each in beams.sequences] == pytest.approx(scores, abs=1e-4)
        for each in output.outputs:
            assert each.finish_reason == ("stop" if each.token_ids[-1] in EOS_IDS else "length")
            assert each.stop_reason is None and each.logprobs is None and each.text == ""
            lengths.add(len(each.token_ids))
    assert {1, 12} < lengths and len(lengths) > 4
    assert is_empty(llm)


def test_one_beam_is_greedy(llama, prompts):
    llm = make_llm(llama[0])
    beams = llm.generate(prompts, beam_params(1, 1, 2.0, False, 12), use_tqdm=False)
    greedy = llm.generate(prompts, SamplingParams(temperature=0, max_tokens=12, logprobs=0), use_tqdm=False)
    for one, other in zip(beams, greedy, strict=True):
        assert one.outputs[0].token_ids == other.outputs[0].token_ids
        assert one.outputs[0].finish_reason == other.outputs[0].finish_reason
        assert one.outputs[0].cumulative_logprob == pytest.approx(other.outputs[0].cumulative_logprob, abs=1e-4)


@pytest.mark.parametrize(
    "fields",
    [
        {"enable_prefix_caching": False},
        {"max_num_seqs": 2},
        {"max_num_batched_tokens": 7},
        {"num_gpu_blocks_override": 5, "block_size": 16},
        {"max_logprobs": 0},
    ],
)
def test_the_way_it_is_run_changes_nothing(llama, prompts, fields):
    params = BeamSearchParams(4, 12, early_stopping="never")
    before = make_llm(llama[0]).beam_search(prompts, params, use_tqdm=False)
    llm = make_llm(llama[0], **fields)
    after = llm.beam_search(prompts, params, use_tqdm=False)
    assert contents(after) == contents(before)
    for one, other in zip(before, after, strict=True):
        assert [each.score for each in one.sequences] == pytest.approx([each.score for each in other.sequences])
    assert is_empty(llm)


def test_the_beams_share_what_is_cached(llama):
    prompt = random_prompts(199, (40,))
    llm = make_llm(llama[0], device="cpu")
    stats = llm.llm_engine.engine_core.scheduler.stats
    (cold,) = llm.generate(prompt, beam_params(4, 1, 1.0, False, 4), use_tqdm=False)
    assert cold.num_cached_tokens == 0
    # After the first step, the prompt's two full blocks are there for each beam of each step, and of some the third.
    assert 3 * 4 * 32 < stats().num_prefix_hit_tokens <= 3 * 4 * 40 + 4 * (0 + 1 + 2)
    (warm,) = llm.generate(prompt, beam_params(4, 1, 1.0, False, 4), use_tqdm=False)
    assert 32 <= warm.num_cached_tokens < 40 and warm.outputs == cold.outputs


def test_a_salt_keeps_the_cached_prefix_apart(llama):
    (prompt,) = random_prompts(199, (40,))
    llm = make_llm(llama[0])
    cached = []
    for salt in ("a", "b", "a"):
        salted = {"prompt_token_ids": prompt, "cache_salt": salt}
        (output,) = llm.generate([salted], beam_params(2, 1, 1.0, False, 3), use_tqdm=False)
        cached.append(output.num_cached_tokens)
    assert cached[:2] == [0, 0] and 32 <= cached[2] < 40


class TestWhatEndsASequence:
    def test_stop_token_ids_end_it_and_are_named(self, llama, prompts):
        folder, model = llama
        llm = make_llm(folder)
        stop = [7, *range(80, 110)]
        params = beam_params(4, 4, 1.0, False, 12)
        params.stop_token_ids = stop
        reasons = set()
        for prompt, output in zip(prompts, llm.generate(prompts, params, use_tqdm=False), strict=True):
            (expected,) = transformers_search(model, [prompt], 4, [*EOS_IDS, *stop], max_new_tokens=12)
            assert [each.token_ids for each in output.outputs] == [tokens for tokens, _ in expected]
            for each in output.outputs:
                assert each.stop_reason == (each.token_ids[-1] if each.token_ids[-1] in stop else None)
                reasons.add(each.stop_reason)
        assert reasons > {None}

    def test_ignore_eos(self, llama, prompts):
        folder, model = llama
        found = make_llm(folder).beam_search(prompts, BeamSearchParams(4, 8, ignore_eos=True), use_tqdm=False)
        for prompt, output in zip(prompts, found, strict=True):
            (expected,) = transformers_search(model, [prompt], 4, None, max_new_tokens=8)
            assert [each.tokens for each in output.sequences] == [prompt + tokens for tokens, _ in expected]
            assert {each.finish_reason for each in output.sequences} == {"length"}

    def test_the_context_ends_it_as_length(self, llama, prompts):
        folder, model = llama
        llm = make_llm(folder, max_model_len=40)
        for max_tokens in (30, None):
            params = beam_params(3, 3, 1.0, "never", 1)
            params.max_tokens = max_tokens
            params.ignore_eos = True
            (output,) = llm.generate(prompts[3], params, use_tqdm=False)
            (expected,) = transformers_search(model, [prompts[3]], 3, None, max_new_tokens=3)
            assert [each.token_ids for each in output.outputs] == [tokens for tokens, _ in expected]
            assert {each.finish_reason for each in output.outputs} == {"length"}


@pytest.fixture(scope="module")
def llm(tmp_path_factory):
    return make_tiny_llm(make_tiny_model(tmp_path_factory.mktemp("tiny")))


class TestWithATokenizer:
    def test_texts(self, llm):
        tokenizer = llm.llm_engine.tokenizer
        params = {"max_tokens": 3, "early_stopping": True}
        ids = tokenizer.encode("the cat")
        (plain,) = llm.beam_search("the cat", BeamSearchParams(3, ignore_eos=True, **params), use_tqdm=False)
        for each in plain.sequences:
            assert each.tokens[: len(ids)] == ids and len(each.tokens) == len(ids) + 3
            assert each.text == tokenizer.decode(each.tokens) and each.text.startswith("the cat")

        biased = {"use_beam_search": True, "temperature": 0, "n": 3, "logit_bias": {EOS: 8.0}, **params}
        (hidden,) = llm.generate("the cat", SamplingParams(**biased), use_tqdm=False)
        (shown,) = llm.generate(
            "the cat",
            SamplingParams(include_stop_str_in_output=True, skip_special_tokens=False, **biased),
            use_tqdm=False,
        )
        (off,) = llm.generate("the cat", SamplingParams(detokenize=False, **biased), use_tqdm=False)
        ends = [each.finish_reason for each in hidden.outputs]
        assert "stop" in ends and hidden.prompt == "the cat"
        for one, other, third in zip(hidden.outputs, shown.outputs, off.outputs, strict=True):
            assert one.token_ids == other.token_ids == third.token_ids and third.text == ""
            stopped = one.finish_reason == "stop"
            assert one.text == tokenizer.decode(one.token_ids[:-1] if stopped else one.token_ids)
            assert other.text == tokenizer.decode(one.token_ids, skip_special_tokens=False)
            assert other.text.endswith("</s>") == stopped

    def test_the_end_of_a_sequence_in_its_text(self, llm):
        embedding = llm.get_tokenizer()
        for include, skip in itertools.product((True, False), (True, False)):
            params = BeamSearchParams(
                30, 2, include_stop_str_in_output=include, skip_special_tokens=skip, length_penalty=-1.0
            )
            (output,) = llm.beam_search("the", params, use_tqdm=False)
            for each in output.sequences:
                ends = each.finish_reason == "stop"
                assert ends == (each.tokens[-1] == EOS)
                shown = each.tokens[:-1] if ends and not include else each.tokens
                assert each.text == embedding.decode(shown, skip_special_tokens=skip)

    def test_the_readings_of_each_token(self, llm):
        (output,) = llm.beam_search("the cat", BeamSearchParams(3, 4, ignore_eos=True), use_tqdm=False)
        for each in output.sequences:
            generated = each.tokens[-4:]
            assert [next(iter(position)) for position in each.logprobs] == generated
            own = [position[token_id] for position, token_id in zip(each.logprobs, generated, strict=True)]
            assert sum(entry.logprob for entry in own) == pytest.approx(each.cum_logprob)
            assert [entry.decoded_token for entry in own] == llm.llm_engine.tokenizer.decode_tokens(generated)
            for position in each.logprobs:
                others = list(position.values())[1:]
                assert len(position) == 3 and [e.rank for e in others] == sorted(e.rank for e in others)
        # The same positions as ordinary readings of the best sequence.
        best = output.sequences[0]
        check = SamplingParams(temperature=0, max_tokens=1, logprobs=3)
        for i in range(4):
            (plain,) = llm.generate([best.tokens[: len(best.tokens) - 4 + i]], check, use_tqdm=False)
            wanted = plain.outputs[0].logprobs[0]
            assert {k: v.logprob for k, v in best.logprobs[i].items()} == pytest.approx(
                {k: wanted[k].logprob for k in best.logprobs[i]}, abs=1e-5
            )

    def test_mixed_with_ordinary_requests(self, llm):
        beam = SamplingParams(use_beam_search=True, temperature=0, n=2, max_tokens=6)
        plain = SamplingParams(temperature=0, max_tokens=5, ignore_eos=True, logprobs=2)
        sampled = SamplingParams(n=2, seed=3, max_tokens=4)
        kinds = [plain, beam, sampled, beam]
        texts = ["a", "b", "the cat", "stop"]
        together = llm.generate(texts, kinds, use_tqdm=False)
        assert [output.prompt for output in together] == texts
        for text, params, output in zip(texts, kinds, together, strict=True):
            (alone,) = llm.generate(text, params, use_tqdm=False)
            assert [each.token_ids for each in output.outputs] == [each.token_ids for each in alone.outputs]
            assert [each.text for each in output.outputs] == [each.text for each in alone.outputs]
        assert len({output.request_id for output in together}) == 4
        assert is_empty(llm)

    def test_the_progress_bar_counts_prompts(self, llm):
        totals: list[int] = []
        updates: list[int] = []

        def make_bar(total: int, **_: Any) -> RecordingBar:
            totals.append(total)
            return RecordingBar(updates)

        llm.beam_search(["a", "b"], BeamSearchParams(2, 3), use_tqdm=make_bar)
        assert (totals, updates) == ([2], [1, 1])

    def test_metrics(self, llm):
        (output,) = llm.generate("a", SamplingParams(use_beam_search=True, temperature=0, max_tokens=3), use_tqdm=False)
        metrics = output.metrics
        assert metrics.arrival_time <= metrics.first_token_time <= metrics.finished_time
