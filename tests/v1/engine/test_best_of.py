"""best_of, and prompts that are cut to what fits."""

from __future__ import annotations

import pytest
from byte_tokenizer import VOCAB_SIZE
from models_util import random_prompts
from tiny_llm import is_empty, make_tiny_llm, make_tiny_model

from vllm import SamplingParams
from vllm.exceptions import VLLMValidationError
from vllm.sampling_params import RequestOutputKind


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    return make_tiny_llm(make_tiny_model(tmp_path_factory.mktemp("tiny")))


def generate(llm, prompts, params):
    return llm.generate(prompts, params, use_tqdm=False)


GREEDY = {"temperature": 0, "max_tokens": 6, "ignore_eos": True, "logprobs": 2, "prompt_logprobs": 1}
COMMON = {"seed": 7, "max_tokens": 6, "ignore_eos": True, "temperature": 1.5}


class TestGreedySequences:
    """n of them are one computation, returned n times."""

    @pytest.mark.parametrize("fields", [{"n": 3}, {"n": 3, "best_of": 3}, {"n": 3, "best_of": 5}], ids=str)
    def test_all_are_the_greedy_one(self, tiny, fields):
        prompts = random_prompts(VOCAB_SIZE, (9, 4))
        single = generate(tiny, prompts, SamplingParams(**GREEDY))
        several = generate(tiny, prompts, SamplingParams(**fields, **GREEDY))
        for one, output in zip(single, several, strict=True):
            assert [each.index for each in output.outputs] == [0, 1, 2]
            for each in output.outputs:
                assert (each.token_ids, each.text) == (one.outputs[0].token_ids, one.outputs[0].text)
                assert each.logprobs == one.outputs[0].logprobs
                assert each.cumulative_logprob == one.outputs[0].cumulative_logprob
                assert each.finish_reason == "length"
            assert len({id(each.token_ids) for each in output.outputs}) == 3
            assert output.prompt_logprobs == one.prompt_logprobs
        assert is_empty(tiny)

    def test_one_is_computed(self, tiny):
        engine = tiny.llm_engine
        engine.add_request("r", [5, 6, 7], SamplingParams(n=4, **GREEDY))
        assert len(engine.engine_core.scheduler.requests) == 1
        outputs = []
        while engine.has_unfinished_requests():
            outputs += engine.step()
        assert [len(output.outputs) for output in outputs] == [4] * 6
        engine.add_request("r", [5, 6, 7], SamplingParams(n=4, **GREEDY))
        engine.abort_request(["r"])
        assert is_empty(tiny)

    def test_a_stream_has_each_of_them(self, tiny):
        engine = tiny.llm_engine
        params = SamplingParams(n=2, output_kind=RequestOutputKind.DELTA, **GREEDY)
        engine.add_request("r", [5, 6, 7], params)
        tokens: dict[int, list[int]] = {0: [], 1: []}
        finished = []
        while engine.has_unfinished_requests():
            for output in engine.step():
                for each in output.outputs:
                    tokens[each.index] += each.token_ids
                    assert len(each.logprobs) == len(each.token_ids)
                    finished += [each.index] if each.finish_reason else []
        (single,) = generate(tiny, [[5, 6, 7]], SamplingParams(**GREEDY))
        assert tokens == {0: single.outputs[0].token_ids, 1: single.outputs[0].token_ids}
        assert finished == [0, 1]

    def test_small_temperatures_sample(self, tiny):
        """Each of n its own sequence, with the readings of 0.01."""
        (prompt,) = random_prompts(VOCAB_SIZE, (9,))
        fields = {"n": 2, "seed": 3, "max_tokens": 3, "logprobs": 3, "logprobs_mode": "processed_logprobs"}
        small, least, raised = (
            generate(tiny, [prompt], SamplingParams(temperature=t, **fields))[0] for t in (1e-6, 1e-5, 0.01)
        )
        assert small.outputs == least.outputs == raised.outputs


class TestBestOf:
    def test_the_n_best_by_cumulative_logprob_best_first(self, tiny):
        (prompt,) = random_prompts(VOCAB_SIZE, (9,))
        (every,) = generate(tiny, [prompt], SamplingParams(n=6, logprobs=0, **COMMON))
        ranked = sorted(every.outputs, key=lambda completion: -completion.cumulative_logprob)
        (best,) = generate(tiny, [prompt], SamplingParams(n=2, best_of=6, **COMMON))
        assert [completion.token_ids for completion in best.outputs] == [one.token_ids for one in ranked[:2]]
        assert [completion.index for completion in best.outputs] == [0, 1]
        assert [one.cumulative_logprob for one in best.outputs] == [one.cumulative_logprob for one in ranked[:2]]
        # Nobody asked for readings; the comparison alone needed them.
        assert [completion.logprobs for completion in best.outputs] == [None, None]
        assert is_empty(tiny)

    def test_readings_come_along_when_asked_for(self, tiny):
        (prompt,) = random_prompts(VOCAB_SIZE, (9,))
        params = SamplingParams(best_of=4, logprob_token_ids=[5], prompt_logprobs=1, **COMMON)
        (output,) = generate(tiny, [prompt], params)
        (completion,) = output.outputs
        assert len(completion.logprobs) == 6 and all(5 in position for position in completion.logprobs)
        sampled = [
            position[token].logprob for position, token in zip(completion.logprobs, completion.token_ids, strict=True)
        ]
        assert completion.cumulative_logprob == pytest.approx(sum(sampled), abs=1e-5)
        assert len(output.prompt_logprobs) == 9

    def test_as_many_as_are_shown_stay_in_their_order(self, tiny):
        (prompt,) = random_prompts(VOCAB_SIZE, (9,))
        plain, same = generate(
            tiny, [prompt] * 2, [SamplingParams(n=3, **COMMON), SamplingParams(n=3, best_of=3, **COMMON)]
        )
        assert [one.token_ids for one in plain.outputs] == [one.token_ids for one in same.outputs]

    def test_a_stream_waits_for_the_end(self, tiny):
        engine = tiny.llm_engine
        engine.add_request("r", [5, 6, 7], SamplingParams(n=1, best_of=3, **COMMON))
        outputs = []
        while engine.has_unfinished_requests():
            outputs += engine.step()
        assert [output.finished for output in outputs] == [True]

    @pytest.mark.parametrize(
        ("fields", "parameter"),
        [
            ({"n": 3, "best_of": 2}, "best_of"),
            ({"best_of": 2, "output_kind": RequestOutputKind.DELTA}, "best_of"),
            ({"best_of": 0}, "best_of"),
            ({"best_of": 10**9}, "best_of"),
        ],
    )
    def test_what_cannot_be(self, fields, parameter):
        with pytest.raises(VLLMValidationError) as caught:
            SamplingParams(**fields)
        assert caught.value.parameter == parameter


class TestTruncatePromptTokens:
    def test_the_last_tokens_stay(self, tiny):
        (prompt,) = random_prompts(VOCAB_SIZE, (200,))
        cut, whole = generate(
            tiny,
            [prompt, prompt[-20:]],
            [
                SamplingParams(max_tokens=3, temperature=0, truncate_prompt_tokens=20, prompt_logprobs=1),
                SamplingParams(max_tokens=3, temperature=0, prompt_logprobs=1),
            ],
        )
        assert cut.prompt_token_ids == prompt[-20:]
        assert cut.outputs[0].token_ids == whole.outputs[0].token_ids
        assert cut.prompt_logprobs == whole.prompt_logprobs

    @pytest.mark.parametrize(("max_tokens", "kept"), [(0, 128), (1, 127), (28, 100), (None, 127), (500, 1)])
    def test_minus_one_leaves_room_for_max_tokens(self, tiny, max_tokens, kept):
        (prompt,) = random_prompts(VOCAB_SIZE, (300,))
        params = SamplingParams(max_tokens=max_tokens, temperature=0, truncate_prompt_tokens=-1)
        (output,) = generate(tiny, [prompt], params)
        assert output.prompt_token_ids == prompt[-kept:]

    def test_a_short_prompt_is_left_alone(self, tiny):
        params = SamplingParams(max_tokens=1, truncate_prompt_tokens=20)
        assert generate(tiny, [[5, 6]], params)[0].prompt_token_ids == [5, 6]

    @pytest.mark.parametrize("limit", [0, -2, 129, 1.5, True])
    def test_bad_limits(self, tiny, limit):
        with pytest.raises(VLLMValidationError, match="truncate_prompt_tokens"):
            generate(tiny, [[5, 6]], SamplingParams(truncate_prompt_tokens=limit))
        # 128 tokens fit max_model_len, but leave no room for output.
        with pytest.raises(VLLMValidationError, match="leaves no room"):
            generate(tiny, [[5] * 200], SamplingParams(truncate_prompt_tokens=128))


def test_min_tokens_beyond_the_context(tiny):
    with pytest.raises(VLLMValidationError, match="min_tokens must be at most 28"):
        generate(tiny, [[5] * 100], SamplingParams(max_tokens=None, min_tokens=29))
