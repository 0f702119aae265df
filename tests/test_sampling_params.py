"""Every request field's check: what is accepted, what is refused, and that the refusal names the field."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest

from vllm import BeamSearchParams, SamplingParams
from vllm.exceptions import VLLMValidationError
from vllm.sampling_params import MAX_LOGPROB_TOKEN_IDS


@pytest.mark.parametrize(
    "value",
    [[3, 1, 2], (3, 1, 2), np.array([3, 1, 2]), np.array([3, 1, 2], np.uint8), [np.int64(3), 1, 2], [3, 1, 3, 2, 1]],
)
def test_token_ids_are_accepted_in_any_integer_container(value):
    params = SamplingParams(logprob_token_ids=value)
    assert params.logprob_token_ids == [3, 1, 2]
    assert all(type(token) is int for token in params.logprob_token_ids)
    assert params.logprob_token_ids_np.dtype == np.int32
    assert params.logprob_token_ids_np.tolist() == [3, 1, 2]
    with pytest.raises(ValueError, match="read-only"):
        params.logprob_token_ids_np[0] = 9


def test_a_range_of_token_ids_is_accepted():
    assert SamplingParams(logprob_token_ids=range(5, 8)).logprob_token_ids == [5, 6, 7]


@pytest.mark.parametrize("empty", [None, [], (), np.empty(0, np.int64), range(0)])
def test_an_empty_list_means_none(empty):
    params = SamplingParams(logprob_token_ids=empty)
    assert params.logprob_token_ids is None
    assert params.num_logprobs is None


@pytest.mark.parametrize(
    "value",
    [[1.5], [1.0], ["7"], [True], [np.bool_(True)], [None], [[1]], "12", b"12", 5, True, 1.5, {"a": 1}, [-1],
     np.array([1.0]), np.array(3), [np.float32(2)]],
)  # fmt: skip
def test_what_is_not_a_token_id_is_refused(value):
    with pytest.raises(VLLMValidationError) as caught:
        SamplingParams(logprob_token_ids=value)
    assert caught.value.parameter == "logprob_token_ids"
    assert "logprob_token_ids" in str(caught.value)


@pytest.mark.parametrize(
    ("logprobs", "ids", "expected"),
    [(None, None, None), (0, None, 0), (5, None, 5), (None, [1, 2], 2), (5, [1, 2], 5), (0, [1], 0), (-1, None, -1)],
)
def test_num_logprobs(logprobs, ids, expected):
    assert SamplingParams(logprobs=logprobs, logprob_token_ids=ids).num_logprobs == expected


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("n", 0), ("n", 1.5), ("n", True), ("n", "2"),
        ("presence_penalty", 2.5), ("presence_penalty", float("nan")), ("presence_penalty", "1"),
        ("frequency_penalty", -2.5), ("repetition_penalty", 0.0), ("repetition_penalty", 2e6),
        ("temperature", -0.1), ("temperature", float("inf")), ("temperature", "0"),
        ("top_p", 0.0), ("top_p", 1.1), ("top_k", -2), ("top_k", 2**70), ("top_k", 1.5), ("min_p", 1.5),
        ("seed", 2**63), ("seed", "x"), ("max_tokens", -1), ("max_tokens", float("inf")), ("max_tokens", float("nan")),
        ("max_tokens", 1e300),
        ("min_tokens", -1), ("min_tokens", 17), ("logprobs", -2), ("logprobs", 1.5), ("logprobs", "3"),
        ("logprobs_mode", "raw"), ("stop", [""]), ("stop", [1]), ("stop", 3), ("stop", "\ud800"),
        ("stop_token_ids", [1.5]), ("stop_token_ids", [-1]), ("stop_token_ids", ["a"]),
        ("logit_bias", {1: float("nan")}), ("logit_bias", {1: True}),
        ("logit_bias", {"a": 1.0}), ("logit_bias", {-1: 1.0}), ("logit_bias", [1]),
        ("allowed_token_ids", []), ("allowed_token_ids", [True]), ("ignore_eos", 1), ("detokenize", 0),
        ("output_kind", "delta"), ("extra_args", [1]),
    ],
)  # fmt: skip
def test_bad_values_name_their_field(field, value):
    with pytest.raises(VLLMValidationError) as caught:
        SamplingParams(**{field: value})
    assert caught.value.parameter == field
    assert field in str(caught.value)


def test_floats_without_a_fraction_are_integers():
    """As JSON of many clients writes them."""
    fields = {
        "n": 2, "best_of": 2, "top_k": 5, "seed": -7, "max_tokens": 16, "min_tokens": 1, "logprobs": -1,
        "prompt_logprobs": 0, "prompt_logprob_start": 1, "truncate_prompt_tokens": -1, "stream_interval": 3,
    }  # fmt: skip
    for kind in (float, np.float32, np.float64):
        params = SamplingParams(**{name: kind(value) for name, value in fields.items()})
        assert {name: getattr(params, name) for name in fields} == fields
        assert all(type(getattr(params, name)) is int for name in fields)
    pattern = SamplingParams(repetition_detection={"max_pattern_size": 4.0, "min_count": 2.0}).repetition_detection
    assert (pattern.max_pattern_size, type(pattern.min_count)) == (4, int)


def test_biases_are_cut_to_the_limits():
    infinite = float("inf")
    given = {1: 101, 2: -250.5, 3: 1e300, 4: infinite, 5: -infinite, "6": 10**400, 7: 100.0, 8: np.float32(-0.5)}
    expected = {1: 100.0, 2: -100.0, 3: 100.0, 4: 100.0, 5: -100.0, 6: 100.0, 7: 100.0, 8: -0.5}
    assert SamplingParams(logit_bias=given).logit_bias == expected


def test_stop_strings_need_text():
    with pytest.raises(VLLMValidationError, match="detokenize"):
        SamplingParams(stop="x", detokenize=False)


@pytest.mark.parametrize("make", [SamplingParams, partial(BeamSearchParams, 2, 2)])
def test_small_temperatures_are_one(make):
    """0 is greedy; whatever lies between it and 0.01 is 0.01."""
    temperatures = [make(temperature=t).temperature for t in (0, -0.0, 5e-324, 1e-6, 1e-5, 0.0099, 0.01, 0.02, 1)]
    assert temperatures == [0, 0, 0.01, 0.01, 0.01, 0.01, 0.01, 0.02, 1]
    assert SamplingParams(temperature=0).is_greedy and not SamplingParams(temperature=1e-9).is_greedy


def test_greedy_sequences_are_one():
    assert [SamplingParams(n=3, temperature=t).num_distinct for t in (0, 1e-6, 1)] == [1, 3, 3]
    assert SamplingParams(n=2, best_of=4, temperature=0).num_distinct == 1
    assert SamplingParams(n=2, best_of=4, temperature=0, use_beam_search=True).num_distinct == 4


class TestVerify:
    def verify(self, vocab_size=1000, max_logprobs=20, max_ids=MAX_LOGPROB_TOKEN_IDS, **fields):
        SamplingParams(**fields).verify(vocab_size, max_logprobs, max_ids)

    def test_the_cap_on_ids_has_its_message(self):
        self.verify(logprob_token_ids=range(128))
        with pytest.raises(VLLMValidationError) as caught:
            self.verify(logprob_token_ids=range(129))
        assert caught.value.args[0] == (
            "Requested logprob_token_ids of length 129, which is greater than max allowed: 128"
        )
        assert (caught.value.parameter, caught.value.value) == ("logprob_token_ids", 129)

    def test_the_cap_can_be_raised_up_to_the_vocabulary(self):
        self.verify(logprob_token_ids=range(129), max_ids=200)
        self.verify(logprob_token_ids=range(1000), max_ids=-1)
        with pytest.raises(VLLMValidationError, match="max allowed: 200"):
            self.verify(logprob_token_ids=range(201), max_ids=200)

    @pytest.mark.parametrize("field", ["logprob_token_ids", "stop_token_ids", "allowed_token_ids"])
    def test_ids_must_be_in_the_vocabulary(self, field):
        self.verify(**{field: [999]})
        with pytest.raises(VLLMValidationError, match=r"\[0, 1000\)") as caught:
            self.verify(**{field: [5, 1000]})
        assert (caught.value.parameter, caught.value.value) == (field, 1000)

    def test_logit_bias_must_be_in_the_vocabulary(self):
        with pytest.raises(VLLMValidationError, match="logit_bias"):
            self.verify(logit_bias={"1000": 1.0})

    @pytest.mark.parametrize(
        ("asked", "cap", "fine"),
        [(20, 20, True), (21, 20, False), (-1, 20, False), (-1, -1, True), (1000, -1, True), (1001, -1, False)],
    )
    def test_the_cap_on_logprobs(self, asked, cap, fine):
        if fine:
            self.verify(logprobs=asked, max_logprobs=cap)
        else:
            with pytest.raises(VLLMValidationError, match="greater than max allowed"):
                self.verify(logprobs=asked, max_logprobs=cap)


def test_clone_shares_no_mutable_field():
    params = SamplingParams(stop=["a"], logit_bias={1: 2.0}, logprob_token_ids=[1])
    twin = params.clone()
    twin.stop.append("b")
    twin.logit_bias[2] = 1.0
    assert params.stop == ["a"]
    assert params.logit_bias == {1: 2.0}


def test_children_have_seeds_of_their_own():
    children = [SamplingParams(n=3, seed=2**63 - 2).child(i) for i in range(3)]
    assert len({child.seed for child in children}) == 3
    assert all(child.n == 1 and -(2**63) <= child.seed < 2**63 for child in children)


def test_the_environment_lowers_the_highest_n(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_MAX_N_SEQUENCES", "4")
    assert SamplingParams(n=4).n == 4
    with pytest.raises(VLLMValidationError, match="n must be at most 4"):
        SamplingParams(n=5)
