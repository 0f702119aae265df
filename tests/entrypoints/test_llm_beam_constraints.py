"""Beam searches with constraints: sequences and scores are those of transformers' beam search, which masks logprobs
without normalising them again, and cumulative logprobs are the model's."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from beam_search_reference import EOS_IDS, beam_params, make_llm, make_model, transformers_search
from byte_tokenizer import EOS, PAD, byte_ids
from models_util import random_prompts
from tiny_llm import is_empty, make_tiny_llm, make_tiny_model
from transformers import AutoModelForCausalLM

from vllm import BeamSearchParams, SamplingParams
from vllm.exceptions import VLLMValidationError
from vllm.sampling_params import StructuredOutputsParams
from vllm.v1.sample.logits_processor import AdapterLogitsProcessor
from vllm.v1.structured_output.grammar import grammar_text
from vllm.v1.structured_output.matcher import grammars_of

VOCAB_SIZE = 199
LENGTH = 8


pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    return make_model("llama", tmp_path_factory.mktemp("llama"))


@pytest.fixture(scope="module")
def llm(llama):
    return make_llm(llama[0])


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    return random_prompts(VOCAB_SIZE, (1, 16, 5, 37))


def params(**fields: Any) -> SamplingParams:
    return SamplingParams(**{"use_beam_search": True, "temperature": 0, "n": 4, "max_tokens": LENGTH, **fields})


def search(model: Any, prompt: list[int], eos: Any = EOS_IDS, **options: Any) -> list[tuple[list[int], float]]:
    """transformers' (ids, score) of one prompt. A score is that of the sequence, divided by its length."""
    return transformers_search(model, [prompt], 4, eos, max_new_tokens=LENGTH, **options)[0]


@torch.no_grad()
def logprob_in_model(model: Any, prompt: list[int], tokens: list[int], temperature: float = 1.0) -> float:
    logits = model(torch.tensor([prompt + tokens])).logits[0, len(prompt) - 1 : -1] / temperature
    return logits.log_softmax(-1).gather(1, torch.tensor(tokens)[:, None]).sum().item()


def assert_same(output: Any, expected: list[tuple[list[int], float]], model: Any, prompt: list[int]) -> None:
    """The same sequences, with the sums of the model's logprobs."""
    assert [each.token_ids for each in output.outputs] == [tokens for tokens, _ in expected]
    sums = [logprob_in_model(model, prompt, tokens) for tokens, _ in expected]
    assert [each.cumulative_logprob for each in output.outputs] == pytest.approx(sums, abs=1e-4)
    scores = [score for _, score in expected]
    assert [each.score for each in output.outputs] == pytest.approx(scores, abs=1e-4)


def unlikely(model: Any, prompt: list[int], count: int) -> list[int]:
    """Ids that are never among a beam's most likely ones."""
    with torch.no_grad():
        order = model(torch.tensor([prompt])).logits[0, -1].argsort()
    return [each for each in order.tolist() if each not in EOS_IDS][:count]


class TestAllowedTokens:
    def test_both_doors_equal_transformers(self, llama, llm, prompts):
        model = llama[1]
        for prompt in prompts:
            for allowed in (list(range(25, 90)), unlikely(model, prompt, 7), [*unlikely(model, prompt, 2), 2]):
                expected = search(model, prompt, prefix_allowed_tokens_fn=lambda _, ids, allowed=allowed: allowed)
                # transformers goes on with what is forbidden where too little is allowed.
                expected = [each for each in expected if set(each[0]) <= set(allowed)]
                (output,) = llm.generate([prompt], params(allowed_token_ids=allowed), use_tqdm=False)
                assert_same(output, expected, model, prompt)
                # A search finds the best under the constraint: its score is its logprob in the model.
                totals = [score * len(tokens) for tokens, score in expected]
                assert [each.cumulative_logprob for each in output.outputs] == pytest.approx(totals, abs=1e-4)
                own = BeamSearchParams(4, LENGTH, allowed_token_ids=allowed)
                (found,) = llm.beam_search([prompt], own, use_tqdm=False)
                assert [each.tokens for each in found.sequences] == [prompt + tokens for tokens, _ in expected]
                assert [each.cum_logprob for each in found.sequences] == pytest.approx(totals, abs=1e-4)
                assert [each.score for each in found.sequences] == pytest.approx([s for _, s in expected], abs=1e-4)

    def test_readings_are_the_model_s_and_of_what_is_allowed(self, llama, llm, prompts):
        allowed = unlikely(llama[1], prompts[1], 3)
        (found,) = llm.beam_search([prompts[1]], BeamSearchParams(4, 3, allowed_token_ids=allowed), use_tqdm=False)
        check = SamplingParams(max_tokens=0, logprob_token_ids=allowed)
        for each in found.sequences:
            for i, position in enumerate(each.logprobs):
                token = each.tokens[len(prompts[1]) + i]
                assert next(iter(position)) == token and set(position) == set(allowed)
                (plain,) = llm.generate([each.tokens[: len(prompts[1]) + i]], check, use_tqdm=False)
                for token_id, wanted in plain.outputs[0].logprobs[0].items():
                    assert position[token_id].logprob == pytest.approx(wanted.logprob, abs=1e-5)
                    assert position[token_id].rank == wanted.rank
                    assert position[token_id].logit == pytest.approx(wanted.logit, abs=1e-5)

    def test_fewer_sequences_than_beams(self, llama, llm):
        (output,) = llm.generate([[1, 2, 3]], params(allowed_token_ids=[9], max_tokens=3), use_tqdm=False)
        assert [each.token_ids for each in output.outputs] == [[9, 9, 9]]
        wanted = logprob_in_model(llama[1], [1, 2, 3], [9, 9, 9])
        assert output.outputs[0].cumulative_logprob == pytest.approx(wanted, abs=1e-4)

    def test_any_number_is_allowed(self, llama, prompts):
        """More than the cap on ids to read: these are not read, but masked."""
        llm = make_llm(llama[0], max_logprob_token_ids=4)
        everything = BeamSearchParams(3, 4, allowed_token_ids=list(range(VOCAB_SIZE)))
        own, plain = (
            llm.beam_search([prompts[2]], each, use_tqdm=False)[0] for each in (everything, BeamSearchParams(3, 4))
        )
        assert [each.tokens for each in own.sequences] == [each.tokens for each in plain.sequences]
        assert [each.cum_logprob for each in own.sequences] == [each.cum_logprob for each in plain.sequences]
        with pytest.raises(VLLMValidationError, match="allowed_token_ids"):
            llm.beam_search([prompts[2]], BeamSearchParams(3, 4, allowed_token_ids=[VOCAB_SIZE]), use_tqdm=False)


@pytest.mark.parametrize(
    "form", [{"regex": "(ab|b[0-9]{1,3}){1,3}"}, {"choice": ["the", "them", "stop it", "a"]}], ids=["regex", "choice"]
)
def test_a_form_leaves_what_it_allows(tmp_path: Path, form: dict[str, Any]) -> None:
    pytest.importorskip("llguidance")
    llm = make_tiny_llm(make_tiny_model(tmp_path))
    model = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).eval()
    prompt = llm.get_tokenizer().encode("hello")
    own = StructuredOutputsParams(**form)
    grammar, grammars = grammar_text(own), grammars_of(llm.model_config)

    def allowed(_: int, ids: torch.Tensor) -> list[int]:
        matcher, mask = grammars.start(grammar), np.zeros(-(-llm.model_config.vocab_size // 32), np.int32)
        generated = [each for each in ids[len(prompt) :].tolist() if each != PAD]
        # transformers asks for beams that have ended or were ruled out, too.
        if matcher.take(generated) is not None or matcher.fill_mask(mask) is not None:
            return [EOS]
        return np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little")).tolist()

    options = {"structured_outputs": own, "max_tokens": 14}
    (output,) = llm.generate([prompt], params(**options), use_tqdm=False)
    expected = transformers_search(model, [prompt], 4, [EOS], max_new_tokens=14, prefix_allowed_tokens_fn=allowed)[0]
    assert_same(output, [each for each in expected if each[1] > -1e4], model, prompt)
    assert len(output.outputs) == 4 and all(each.finish_reason == "stop" for each in output.outputs)
    (found,) = llm.beam_search([prompt], BeamSearchParams(4, 14, structured_outputs=own), use_tqdm=False)
    assert [each.tokens[len(prompt) :] for each in found.sequences] == [each.token_ids for each in output.outputs]
    assert is_empty(llm)


@pytest.mark.parametrize("bias", [{0: -100.0, 7: -100.0, 30: -100.0}, {5: 4.0, 70: 3.0, 31: 5.0, 0: -1.5}])
def test_a_bias_adds_to_the_rank_and_not_to_the_logprob(llama, llm, prompts, bias):
    sequence_bias = {(token_id,): value for token_id, value in bias.items()}
    for prompt, output in zip(prompts, llm.generate(prompts, params(logit_bias=bias), use_tqdm=False), strict=True):
        assert_same(output, search(llama[1], prompt, sequence_bias=sequence_bias), llama[1], prompt)
        assert not any(value == -100.0 for each in output.outputs for t, value in bias.items() if t in each.token_ids)


def test_min_tokens(llama, llm, prompts):
    for prompt, output in zip(prompts, llm.generate(prompts, params(min_tokens=4), use_tqdm=False), strict=True):
        assert_same(output, search(llama[1], prompt, min_new_tokens=4), llama[1], prompt)
        assert min(len(each.token_ids) for each in output.outputs) > 4
    (output,) = llm.generate([prompts[1]], params(min_tokens=LENGTH, stop_token_ids=[5, 6]), use_tqdm=False)
    assert {each.finish_reason for each in output.outputs} == {"length"}
    assert not {5, 6, *EOS_IDS} & {token for each in output.outputs for token in each.token_ids[:-1]}


def test_several_constraints_at_once(tmp_path):
    """Letters alone, without some letters and pairs; pairs across the prompt's end do not count."""
    folder = make_tiny_model(tmp_path)
    model, llm = AutoModelForCausalLM.from_pretrained(folder), make_tiny_llm(folder)
    letters, prompt = byte_ids("bcdfgjkl"), byte_ids("ab")
    (free,) = llm.generate([prompt], params(allowed_token_ids=[*letters, EOS]), use_tqdm=False)
    tokens = free.outputs[0].token_ids
    pairs = [tokens[i : i + 2] for i in (0, 2)]
    words = [llm.get_tokenizer().decode(pair) for pair in pairs]
    first = llm.get_tokenizer().decode(prompt[-1:] + tokens[:1])
    single = next(each for each in letters if each not in tokens[:2])

    def constrain(input_ids: Any, scores: Any) -> Any:
        masked = torch.full_like(scores, -torch.inf)
        masked[:, letters] = scores[:, letters]
        masked[:, single] = -torch.inf
        for row, ids in enumerate(input_ids.tolist()):
            for one, other in pairs:
                if ids[len(prompt) :][-1:] == [one]:
                    masked[row, other] = -torch.inf
        return masked

    fields = {"allowed_token_ids": [*letters, EOS], "min_tokens": LENGTH, "logit_bias": {letters[0]: 0.0}}
    bad_words = [*words, first, llm.get_tokenizer().decode([single])]
    (output,) = llm.generate([prompt], params(bad_words=bad_words, **fields), use_tqdm=False)
    assert_same(output, search(model, prompt, [EOS], logits_processor=[constrain]), model, prompt)
    for each in output.outputs:
        assert not any(word in each.text for word in words), "a bad word"
    assert any(word in free.outputs[0].text for word in words)


class NoRepeat(AdapterLogitsProcessor):
    """Forbids the last token of the output, for requests that ask for it; `late`: as one that leaves the argmax."""

    late = False

    def is_argmax_invariant(self) -> bool:
        return self.late

    def new_req_logits_processor(self, own: SamplingParams) -> Any:
        return forbid_last if (own.extra_args or {}).get("no_repeat") else None


class LateNoRepeat(NoRepeat):
    late = True


def forbid_last(prompt_ids: list[int], output_ids: list[int], logits: torch.Tensor) -> torch.Tensor:
    logits[output_ids[-1:] or prompt_ids[:1]] = -torch.inf
    return logits


class TestProcessors:
    @staticmethod
    def expected(model: Any, prompt: list[int]) -> list[tuple[list[int], float]]:
        def process(input_ids: Any, scores: Any) -> Any:
            scores = scores.clone()
            for row, ids in enumerate(input_ids.tolist()):
                forbid_last(ids[: len(prompt)], ids[len(prompt) :], scores[row])
            return scores

        return search(model, prompt, None, logits_processor=[process])

    def test_callables_see_a_beam_as_output(self, llama, llm, prompts):
        own = params(logits_processors=[forbid_last], ignore_eos=True)
        for prompt, output in zip(prompts, llm.generate(prompts, own, use_tqdm=False), strict=True):
            assert_same(output, self.expected(llama[1], prompt), llama[1], prompt)

    @pytest.mark.parametrize("processor", [NoRepeat, LateNoRepeat])
    def test_classes(self, llama, prompts, processor):
        llm = make_llm(llama[0], logits_processors=[processor])
        own = [params(extra_args=extra, ignore_eos=True) for extra in ({"no_repeat": 1}, None)]
        found = llm.generate(prompts * 2, [own[0]] * 4 + [own[1]] * 4, use_tqdm=False)
        for prompt, output, plain in zip(prompts, found, found[4:], strict=False):
            assert_same(output, self.expected(llama[1], prompt), llama[1], prompt)
            assert_same(plain, search(llama[1], prompt, None), llama[1], prompt)

    def test_a_change_is_like_the_same_bias(self, llama, llm, prompts):
        def add(output_ids: list[int], logits: torch.Tensor) -> torch.Tensor:
            logits[[5, 70]] += 5.0
            return logits

        own = [params(logit_bias={5: 5.0, 70: 5.0}), params(logits_processors=[add])]
        found = llm.generate(prompts * 2, [own[0]] * 4 + [own[1]] * 4, use_tqdm=False)
        assert [each.outputs for each in found[:4]] == [each.outputs for each in found[4:]]


class TestTemperature:
    @pytest.mark.parametrize("temperature", [0.5, 3.0])
    def test_it_divides_the_model_s_logits(self, llama, llm, prompts, temperature):
        def process(input_ids: Any, scores: Any) -> Any:
            return (scores / temperature).log_softmax(-1)

        own = BeamSearchParams(4, LENGTH, temperature=temperature)
        for prompt, output in zip(prompts, llm.beam_search(prompts, own, use_tqdm=False), strict=True):
            expected = search(llama[1], prompt, logits_processor=[process])
            assert [each.tokens for each in output.sequences] == [prompt + tokens for tokens, _ in expected]
            assert [each.score for each in output.sequences] == pytest.approx([s for _, s in expected], abs=1e-4)
            sums = [logprob_in_model(llama[1], prompt, tokens) for tokens, _ in expected]
            assert [each.cum_logprob for each in output.sequences] == pytest.approx(sums, abs=1e-4)

    def test_beside_allowed_tokens(self, llama, llm, prompts):
        allowed = unlikely(llama[1], prompts[1], 5)
        own = BeamSearchParams(4, 3, temperature=2.0, allowed_token_ids=allowed)
        (output,) = llm.beam_search([prompts[1]], own, use_tqdm=False)
        for each in output.sequences:
            tempered = logprob_in_model(llama[1], prompts[1], each.tokens[len(prompts[1]) :], 2.0)
            assert each.score * 3 == pytest.approx(tempered, abs=1e-4)

    def test_one_rule_for_small_ones(self, llm, prompts):
        small, raised, zero, one = (
            llm.beam_search([prompts[1]], BeamSearchParams(4, LENGTH, temperature=t), use_tqdm=False)[0]
            for t in (1e-6, 0.01, 0, 1.0)
        )
        assert [each.score for each in small.sequences] == [each.score for each in raised.sequences]
        assert [each.tokens for each in zero.sequences] == [each.tokens for each in one.sequences]


class TestModes:
    def test_the_mode_says_what_is_returned_and_not_what_is_found(self, llama, prompts):
        allowed = unlikely(llama[1], prompts[1], 5)
        own = BeamSearchParams(3, 4, allowed_token_ids=allowed)
        found = {
            mode: make_llm(llama[0], logprobs_mode=mode).beam_search([prompts[1]], own, use_tqdm=False)[0].sequences
            for mode in ("raw_logprobs", "processed_logprobs", "raw_logits", "processed_logits")
        }
        raw = found["raw_logprobs"]
        for mode, sequences in found.items():
            assert [each.tokens for each in sequences] == [each.tokens for each in raw]
            assert [each.score for each in sequences] == pytest.approx([each.score for each in raw], abs=1e-5)
            for each, same in zip(sequences, raw, strict=True):
                masses = [sum(torch.tensor(e.logit).sub(p.lse).exp() for e in p.values()) for p in each.logprobs]
                if mode.startswith("processed"):
                    # The candidates that are kept, of five, among those five alone.
                    assert all(0.5 < mass <= 1 + 1e-5 for mass in masses)
                    assert each.cum_logprob > same.cum_logprob + 1
                else:
                    assert each.cum_logprob == same.cum_logprob
                if mode.endswith("logits"):
                    assert all(e.logprob == e.logit for p in each.logprobs for e in p.values())
                else:
                    own_logprobs = [next(iter(position.values())).logprob for position in each.logprobs]
                    assert sum(own_logprobs) == pytest.approx(each.cum_logprob)

    def test_a_request_s_own_mode(self, llm, prompts):
        fields = {"allowed_token_ids": [9], "max_tokens": 3}
        (output,) = llm.generate([prompts[1]], params(logprobs_mode="processed_logprobs", **fields), use_tqdm=False)
        assert output.outputs[0].cumulative_logprob == 0.0


class TestDeadEnds:
    def test_a_beam_without_candidates_is_dropped(self, llm):
        def end_after_9(output_ids: list[int], logits: torch.Tensor) -> torch.Tensor:
            return logits.fill_(-torch.inf) if 9 in output_ids else logits

        own = params(allowed_token_ids=[9, 10], logits_processors=[end_after_9], max_tokens=3)
        (output,) = llm.generate([[1, 2, 3]], own, use_tqdm=False)
        assert sorted(each.token_ids for each in output.outputs) == [[10, 10, 9], [10, 10, 10]]
        assert is_empty(llm)

    def test_a_search_that_finds_nothing_ends_alone(self, llm, prompts):
        def end_at_2(output_ids: list[int], logits: torch.Tensor) -> torch.Tensor:
            return logits.fill_(-torch.inf) if len(output_ids) == 2 else logits

        own = [params(), params(logits_processors=[end_at_2], ignore_eos=True), params()]
        broken = llm.generate(prompts[:3], own, use_tqdm=False)
        clean = llm.generate(prompts[:3], params(), use_tqdm=False)
        (ended,) = broken[1].outputs
        assert (ended.finish_reason, ended.stop_reason, ended.token_ids) == ("error", "no_token_left", [])
        assert broken[1].request_id in ended.error and "rule out every one" in ended.error
        assert [broken[0].outputs, broken[2].outputs] == [clean[0].outputs, clean[2].outputs]
        assert is_empty(llm)

    def test_contradictions_are_refused_before_anything_runs(self, llm):
        with pytest.raises(VLLMValidationError, match="allowed_token_ids and min_tokens"):
            llm.generate([[1]], [params(allowed_token_ids=EOS_IDS, min_tokens=1)], use_tqdm=False)
        assert is_empty(llm)


def test_the_best_of_beams_with_less_to_choose_from(llm, prompts):
    """A wide search whose beams have fewer allowed tokens than candidates."""
    own = beam_params(16, 16, 1.0, "never", 4)
    own.allowed_token_ids = [9, 10]
    (output,) = llm.generate([prompts[2]], own, use_tqdm=False)
    assert len({tuple(each.token_ids) for each in output.outputs}) == 16
