"""logprob_token_ids through the whole engine: what upstream gets wrong, what must be refused, what must not mix."""

from __future__ import annotations

import pickle
import random

import numpy as np
import pytest
from readings_reference import assert_same_readings

from vllm import SamplingParams
from vllm.exceptions import VLLMValidationError
from vllm.logprobs import FlatLogprobs


def greedy(**fields) -> SamplingParams:
    return SamplingParams(**{"temperature": 0, "max_tokens": 1, **fields})


def one(llm, prompt, params):
    (output,) = llm.generate([prompt], params, use_tqdm=False)
    return output.outputs[0]


class TestWhatUpstreamGetsWrong:
    def test_1_ranks_are_ranks_in_the_vocabulary(self, llm):
        everything = one(llm, "Once upon a time", greedy(logprobs=-1)).logprobs[0]
        sampled = next(iter(everything))
        assert everything[sampled].rank == 1
        # The sampled token stands last among ten ids; upstream reports 10 for it.
        ids = [7, 500, 1000, 42, 9000, 12, 333, 40000, 28000, sampled]
        readings = one(llm, "Once upon a time", greedy(logprob_token_ids=ids)).logprobs[0]
        assert readings[sampled].rank == 1
        assert {i: readings[i].rank for i in ids} == {i: everything[i].rank for i in ids}
        assert sorted(entry.rank for entry in everything.values())[:5] == [1, 2, 3, 4, 5]

    def test_2_a_neighbour_with_ids_leaves_top_k_alone(self, llm):
        plain, ids = greedy(logprobs=5), greedy(logprob_token_ids=[1, 2, 3])
        alone = one(llm, "Once upon a time", plain)
        outputs = llm.generate(["Once upon a time", "The capital of France is"] * 2, [plain, ids] * 2, use_tqdm=False)
        for output in outputs[::2]:
            position = output.outputs[0].logprobs[0]
            assert position == alone.logprobs[0]
            assert len(position) == 5
            assert all(entry.logprob > -50 for entry in position.values())
            assert [entry.rank for entry in position.values()] == [1, 2, 3, 4, 5]

    def test_3_ties_share_the_better_rank(self, llm):
        from vllm.v1.worker.gpu.sample.logprob import compute_topk_logprobs

        torch = pytest.importorskip("torch")
        logits = torch.tensor([[2.0, 5.0, 5.0, 1.0, 5.0, 2.0]], dtype=torch.bfloat16)
        readings = compute_topk_logprobs(logits, 6, torch.tensor([4], dtype=torch.int32))
        assert readings.selected_token_ranks.tolist() == [1]
        assert dict(zip(readings.logprob_token_ids[0].tolist(), readings.ranks[0].tolist(), strict=True)) == {
            4: 1, 1: 1, 2: 1, 0: 4, 5: 4, 3: 6,
        }  # fmt: skip

    def test_4_top_k_and_ids_together_at_any_sizes(self, llm):
        top = list(one(llm, "Once upon a time", greedy(logprobs=7)).logprobs[0])
        ids = [top[2], 17, 18, top[0], 19]
        both = one(llm, "Once upon a time", greedy(logprobs=7, logprob_token_ids=ids)).logprobs[0]
        assert list(both) == [*top, 17, 18, 19]

    @pytest.mark.parametrize("ids", [[1.5], ["7042"], [7042.0], [True], [-1], [None]])
    def test_5_bad_ids_are_refused_at_once_and_nothing_hangs(self, llm, ids):
        with pytest.raises(VLLMValidationError, match="logprob_token_ids"):
            one(llm, "Once upon a time", SamplingParams(logprob_token_ids=ids))
        assert one(llm, "Once upon a time", greedy(logprob_token_ids=[3])).logprobs[0][3].rank > 0

    def test_5_a_range_is_as_good_as_a_list(self, llm):
        assert set(one(llm, "Once upon a time", greedy(logprob_token_ids=range(10, 13))).logprobs[0]) >= {10, 11, 12}


class TestLimits:
    @pytest.mark.parametrize("bad", [[49152], [10**12], range(129)])
    def test_a_bad_request_is_refused_and_the_next_call_works(self, llm, bad):
        good = greedy(logprob_token_ids=range(128))
        with pytest.raises(VLLMValidationError) as caught:
            llm.generate(["a", "b", "c"], [good, greedy(logprob_token_ids=bad), good], use_tqdm=False)
        assert caught.value.parameter == "logprob_token_ids"
        assert not llm.llm_engine.has_unfinished_requests()
        outputs = llm.generate(["a", "b"], good, use_tqdm=False)
        assert all(set(range(128)) <= set(output.outputs[0].logprobs[0]) for output in outputs)

    def test_129_ids_have_the_contracts_message(self, llm):
        with pytest.raises(VLLMValidationError) as caught:
            one(llm, "a", greedy(logprob_token_ids=range(129)))
        assert caught.value.args[0] == (
            "Requested logprob_token_ids of length 129, which is greater than max allowed: 128"
        )

    def test_an_empty_list_means_no_readings(self, llm):
        assert one(llm, "a", greedy(logprob_token_ids=[])).logprobs is None

    @pytest.mark.parametrize(
        "prompt", ["", [], [49152], [-1], [1.5], [True], [[5], 5], {"text": "a"}, "\ud800", {"prompt": 3}]
    )
    def test_bad_prompts(self, llm, prompt):
        with pytest.raises(VLLMValidationError):
            llm.generate([prompt], greedy(), use_tqdm=False)
        assert one(llm, "a", greedy()).token_ids

    def test_a_prompt_without_room_for_output(self, llm):
        with pytest.raises(VLLMValidationError, match=r"1024 tokens.*max_model_len=1024"):
            llm.generate([[5] * 1024], greedy(), use_tqdm=False)
        (output,) = llm.generate([[5] * 1023], greedy(max_tokens=9, ignore_eos=True), use_tqdm=False)
        assert (len(output.outputs[0].token_ids), output.outputs[0].finish_reason) == (1, "length")


def test_many_kinds_in_one_call_equal_each_alone(llm):
    """64 scoring requests with 20 ids, 16 plain top-k requests and 16 without logprobs, in one call. Every fourth of
    them is computed once more."""
    rng = random.Random(0)
    words = "the cat sat on a mat and looked at seven blue birds while it rained over an old stone house".split()
    prompts = [" ".join(rng.choices(words, k=rng.randint(2, 24))) for _ in range(96)]
    params = [
        *(greedy(logprob_token_ids=rng.sample(range(49152), 20)) for _ in range(64)),
        *(greedy(max_tokens=2, logprobs=rng.randint(1, 8)) for _ in range(16)),
        *(greedy(max_tokens=2) for _ in range(16)),
    ]
    order = rng.sample(range(96), 96)
    together = llm.generate([prompts[i] for i in order], [params[i] for i in order], use_tqdm=False)
    together = [output for _, output in sorted(zip(order, together, strict=True), key=lambda pair: pair[0])]
    llm.reset_prefix_cache()
    for index in range(0, 96, 4):
        (alone,) = llm.generate([prompts[index]], params[index], use_tqdm=False)
        assert_same_readings(together[index], alone, tolerance=1e-5)
        llm.reset_prefix_cache()
    assert all(output.outputs[0].logprobs is None for output in together[80:])


@pytest.mark.parametrize("mode", ["raw_logprobs", "processed_logprobs", "raw_logits", "processed_logits"])
def test_the_mode_belongs_to_the_request(llm, mode):
    ids = [260, 216, 28]
    common = {"temperature": 0.5, "top_k": 2, "seed": 3, "max_tokens": 1, "logit_bias": {260: 3.0}}
    everything = one(llm, "Once upon a time", greedy(logprobs=-1)).logprobs[0]
    raw = np.full(49152, -np.inf)
    raw[list(everything)] = [entry.logit for entry in everything.values()]
    processed = raw.copy()
    processed[260] += 3.0
    processed /= 0.5
    processed[np.argsort(processed)[:-2]] = -np.inf
    logits = processed if mode.startswith("processed") else raw
    expected = (
        logits if mode.endswith("logits") else logits - np.log(np.exp(logits - logits.max()).sum()) - logits.max()
    )
    neighbours = [SamplingParams(logprob_token_ids=ids, logprobs_mode=m, **common) for m in ("raw_logits", mode, None)]
    output = llm.generate(["Once upon a time"] * 3, neighbours, use_tqdm=False)[1].outputs[0]
    for token_id in ids:
        entry = output.logprobs[0][token_id]
        assert entry.logprob == pytest.approx(expected[token_id], abs=1e-4)
        assert entry.logit == pytest.approx(logits[token_id], abs=1e-4)
        assert entry.rank == 1 + (logits > logits[token_id]).sum()


def test_readings_are_arrays_and_survive_pickling(llm):
    ids = [5, 3, 9]
    (output,) = llm.generate(["One two three"], greedy(logprob_token_ids=ids, max_tokens=4, ignore_eos=True))
    readings = output.outputs[0].logprobs
    assert isinstance(readings, FlatLogprobs)
    chosen = readings.select(ids)
    assert chosen.logprobs.shape == chosen.logits.shape == chosen.ranks.shape == (4, 3)
    for position in range(4):
        assert [readings[position][i].logprob for i in ids] == chosen.logprobs[position].tolist()
        assert readings[position].mass(ids) == pytest.approx(np.exp(chosen.logprobs[position]).sum(), rel=1e-5)
    np.testing.assert_allclose(chosen.logits - chosen.logprobs, readings.lse[:, None].repeat(3, 1), atol=1e-4)
    sampled = [readings[i][token].logprob for i, token in enumerate(output.outputs[0].token_ids)]
    assert output.outputs[0].cumulative_logprob == pytest.approx(sum(sampled), abs=1e-5)
    again = pickle.loads(pickle.dumps(output))
    assert again.outputs[0].logprobs == readings


def test_a_larger_cap_reads_any_number_of_ids(tmp_path):
    from models_util import make_random_model

    from vllm import LLM

    folder, _ = make_random_model("llama", "small", tmp_path)
    options = {"skip_tokenizer_init": True, "dtype": "float32", "max_logprobs": -1}
    llm = LLM(str(folder), max_logprob_token_ids=-1, **options)
    everything = one(llm, [1, 2, 3], greedy(logprobs=-1)).logprobs[0]
    assert one(llm, [1, 2, 3], greedy(logprob_token_ids=range(199))).logprobs[0] == everything
    llm = LLM(str(folder), max_logprob_token_ids=150, **options)
    with pytest.raises(VLLMValidationError, match="max allowed: 150"):
        one(llm, [1, 2, 3], greedy(logprob_token_ids=range(151)))
