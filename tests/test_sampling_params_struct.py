"""SamplingParams as a msgspec.Struct in upstream's order, and its fields that are taken at their neutral values."""

from __future__ import annotations

import copy
import inspect
import pickle

import msgspec
import pytest

from vllm import SamplingParams
from vllm.exceptions import VLLMValidationError
from vllm.sampling_params import FIELDS, GuidedDecodingParams, SamplingType, StructuredOutputsParams

# As upstream 0.33 has them, of those that a caller may give by position.
FIRST = (
    "n presence_penalty frequency_penalty repetition_penalty temperature watermarking top_p top_k min_p seed stop "
    "stop_token_ids ignore_eos max_tokens min_tokens logprobs prompt_logprobs prompt_logprob_token_ids "
    "prompt_logprob_start logprob_token_ids flat_logprobs detokenize skip_special_tokens spaces_between_special_tokens "
    "include_stop_str_in_output output_kind"
).split()


def test_fields_come_in_upstreams_order():
    assert list(SamplingParams.__struct_fields__[: len(FIRST)]) == FIRST
    params = SamplingParams(1, 0.5, 0.25)
    assert (params.n, params.presence_penalty, params.frequency_penalty) == (1, 0.5, 0.25)


def test_every_field_is_an_argument():
    params = SamplingParams(temperature=0.5, stop=["a"], logprob_token_ids=[3], extra_args={"a": [1]})
    fields = {name: getattr(params, name) for name in SamplingParams.__struct_fields__}
    assert SamplingParams(**fields) == params
    assert set(SamplingParams.__annotations__) >= set(SamplingParams.__struct_fields__)


def test_the_signature_shows_types_alone():
    shown = inspect.signature(SamplingParams).parameters
    assert str(shown["temperature"]) == "temperature: float = 1.0"
    assert not any("Annotated" in str(each) for each in shown.values())


@pytest.mark.parametrize("name", FIELDS)
def test_every_field_is_checked(name):
    with pytest.raises(VLLMValidationError) as caught:
        SamplingParams(**{name: ...})
    assert caught.value.parameter == name


def test_copies():
    params = SamplingParams(temperature=0.5, stop=["a"], logprob_token_ids=[3])
    assert params.logprob_token_ids_np.tolist() == [3]
    other = msgspec.structs.replace(params, logprob_token_ids=[4, 5])
    assert (other.temperature, other.logprob_token_ids_np.tolist()) == (0.5, [4, 5])
    with pytest.raises(VLLMValidationError, match="temperature"):
        msgspec.structs.replace(params, temperature=-1.0)
    for made in (copy.copy(params), copy.deepcopy(params), params.clone(), pickle.loads(pickle.dumps(params))):
        assert made == params
        assert made.logprob_token_ids_np.tolist() == [3]
    own = params.clone()
    own.stop.append("b")
    own.logprob_token_ids.append(7)
    assert (params.stop, params.logprob_token_ids) == (["a"], [3])


def test_msgspec_reads_what_it_writes():
    form = StructuredOutputsParams(choice=["a"])
    params = SamplingParams(n=2, stop=["a"], prompt_logprob_token_ids=[[1], [2, 3]], structured_outputs=form)
    for read in (
        msgspec.msgpack.decode(msgspec.msgpack.encode(params), type=SamplingParams),
        msgspec.json.decode(msgspec.json.encode(params), type=SamplingParams),
        msgspec.convert(msgspec.to_builtins(params), SamplingParams),
    ):
        assert read == params
    assert msgspec.convert({"logprob_token_ids": [5, 9]}, SamplingParams).logprob_token_ids_np.tolist() == [5, 9]
    with pytest.raises(msgspec.ValidationError, match="temperature must be in"):
        msgspec.convert({"temperature": -1.0}, SamplingParams)


@pytest.mark.parametrize(
    ("params", "kind"),
    [
        (SamplingParams(temperature=0), SamplingType.GREEDY),
        (SamplingParams(), SamplingType.RANDOM),
        (SamplingParams(seed=0), SamplingType.RANDOM_SEED),
    ],
)
def test_sampling_type(params, kind):
    assert params.sampling_type is kind


def test_stop_token_ids_of_request_and_model():
    params = SamplingParams(stop_token_ids=[5])
    assert params.all_stop_token_ids == {5}
    params.update_from_generation_config({"eos_token_id": [2, 3]}, eos_token_id=4)
    assert params.all_stop_token_ids == {2, 3, 4, 5}
    params.update_from_generation_config({"eos_token_id": 0})
    assert params.all_stop_token_ids == {0, 5}
    ignoring = SamplingParams(ignore_eos=True)
    ignoring.update_from_generation_config({"eos_token_id": 2}, eos_token_id=4)
    assert ignoring.all_stop_token_ids == set()


@pytest.mark.parametrize(
    ("name", "neutral", "asking"),
    [
        ("watermarking", [None, False], True),
        ("thinking_token_budget", [None], 10),
        ("routed_experts_prompt_start", [0], 1),
    ],
)
def test_what_is_not_done_is_refused_by_name(name, neutral, asking):
    for value in neutral:
        SamplingParams(**{name: value})
    with pytest.raises(VLLMValidationError, match=f"{name} is not supported by this engine: .") as caught:
        SamplingParams(**{name: asking})
    assert caught.value.parameter == name


def test_the_older_name_of_the_form():
    assert SamplingParams(guided_decoding=GuidedDecodingParams()).structured_outputs is None
    params = SamplingParams(guided_decoding=GuidedDecodingParams(regex="a*", whitespace_pattern=" "))
    assert params.structured_outputs == StructuredOutputsParams(regex="a*", whitespace_pattern=" ")
    assert SamplingParams(structured_outputs={"choice": ["a", "b"]}).structured_outputs.choice == ["a", "b"]
    both = SamplingParams(guided_decoding=GuidedDecodingParams(regex="a*"), structured_outputs={"regex": "a*"})
    assert both.structured_outputs == StructuredOutputsParams(regex="a*")
    for fields, says in (
        ({"structured_outputs": params.structured_outputs}, "give one of them"),
        ({"guided_decoding": GuidedDecodingParams(regex="a", backend="outlines")}, "one of auto, guidance"),
    ):
        with pytest.raises(VLLMValidationError, match=says):
            SamplingParams(**{"guided_decoding": GuidedDecodingParams(regex="a*"), **fields})


@pytest.mark.parametrize("name", ["flat_logprobs", "skip_clone", "skip_reading_prefix_cache"])
def test_flags(name):
    SamplingParams(**{name: True})
    with pytest.raises(VLLMValidationError, match=name):
        SamplingParams(**{name: 1})


def test_a_strong_repetition_penalty():
    assert SamplingParams(repetition_penalty=25.0).repetition_penalty == 25.0


def test_none_gives_a_field_its_default() -> None:
    """Tables of requests, as Ray's, hold a None where a row has no value."""
    assert SamplingParams(**dict.fromkeys(FIELDS)) == SamplingParams(max_tokens=None)
    assert SamplingParams.from_optional(temperature=0.5, top_k=None).temperature == 0.5
