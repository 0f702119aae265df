"""Answers of a given form through the engine: every answer has it, and nothing but what is drawn changes."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_llm import is_empty, make_tiny_llm
from transformers import AutoModelForCausalLM

from vllm import LLM, SamplingParams
from vllm.exceptions import VLLMValidationError
from vllm.sampling_params import RequestOutputKind, StructuredOutputsParams

pytest.importorskip("llguidance")

PATTERN = "(ab|b[0-9]{1,3}){1,3}"
SCHEMA = {
    "type": "object",
    "properties": {"label": {"enum": ["yes", "no"]}, "n": {"type": "integer", "minimum": 0, "maximum": 99}},
    "required": ["label", "n"],
    "additionalProperties": False,
}
COMPACT = {"disable_any_whitespace": True}


@pytest.fixture(scope="module")
def llm(folder: Path) -> LLM:
    return make_tiny_llm(folder)


def drawing(seed: int | None = None, **form: Any) -> SamplingParams:
    shape = StructuredOutputsParams(**form) if form else None
    return SamplingParams(temperature=1.0, seed=seed, max_tokens=60, logprobs=2, structured_outputs=shape)


def texts(llm: LLM, prompts: list[str], params: Any) -> list[str]:
    outputs = llm.generate(prompts, params, use_tqdm=False)
    assert {choice.finish_reason for output in outputs for choice in output.outputs} <= {"stop", "length"}
    return [choice.text for output in outputs for choice in output.outputs]


def has_form(text: str, form: dict[str, Any]) -> bool:
    if "choice" in form:
        return text in form["choice"]
    if "regex" in form:
        return re.fullmatch(form["regex"], text) is not None
    value = json.loads(text)
    return set(value) == {"label", "n"} and value["label"] in ("yes", "no") and 0 <= value["n"] <= 99


FORMS: list[dict[str, Any]] = [{"choice": ["the", "them", "a"]}, {"regex": PATTERN}, {"json": SCHEMA, **COMPACT}]


@pytest.mark.parametrize("form", FORMS, ids=["choice", "regex", "json"])
@pytest.mark.parametrize("temperature", [0, 1])
def test_every_answer_has_the_form(llm: LLM, form: dict[str, Any], temperature: float) -> None:
    params = drawing(**form)
    params.temperature, params.n = temperature, 1 if temperature == 0 else 4
    found = texts(llm, ["a", "hello", "the stop"], params)
    assert [text for text in found if not has_form(text, form)] == []
    assert is_empty(llm)


def test_a_form_that_has_ended_ends_the_answer_before_min_tokens(llm: LLM) -> None:
    params = drawing(seed=1, choice=["the", "them"])
    params.min_tokens = 20
    pattern = drawing(seed=1, regex="[ab]{2,60}")
    pattern.min_tokens = 5
    outputs = llm.generate(["a", "b"], [params, pattern], use_tqdm=False)
    (ended,), (longer,) = (output.outputs for output in outputs)
    assert ended.text in ("the", "them") and ended.finish_reason == "stop" and len(ended.token_ids) < 20
    assert len(longer.token_ids) >= 5
    assert is_empty(llm)


def test_free_requests_beside_it_are_as_alone(llm: LLM) -> None:
    free = [drawing(seed=index) for index in range(3)]
    alone = llm.generate(["one", "two", "three"], free, use_tqdm=False)
    mixed = [free[0], drawing(**FORMS[0]), free[1], drawing(**FORMS[1]), drawing(**FORMS[2]), free[2]]
    outputs = llm.generate(["one", "x", "two", "y", "z", "three"], mixed, use_tqdm=False)
    for index, form in zip((1, 3, 4), FORMS, strict=True):
        assert has_form(outputs[index].outputs[0].text, form)
    for one, other in zip(alone, (outputs[index] for index in (0, 2, 5)), strict=True):
        assert one.outputs[0].token_ids == other.outputs[0].token_ids
        assert one.outputs[0].logprobs == other.outputs[0].logprobs


def test_readings_are_those_of_the_raw_model(llm: LLM) -> None:
    """Readings equal those of the same tokens as a given continuation, without a grammar."""
    ids = [3, 70, 100]
    params = drawing(seed=3, **FORMS[1])
    params.logprob_token_ids = ids
    (bound,) = llm.generate(["hello"], params, use_tqdm=False)
    tokens = list(bound.outputs[0].token_ids)
    trace = SamplingParams(trace_decode_token_ids=tokens, logprobs=2, logprob_token_ids=ids)
    (given,) = llm.generate(["hello"], trace, use_tqdm=False)
    for one, other in zip(bound.outputs[0].logprobs, given.outputs[0].logprobs, strict=True):
        assert {name: (each.logprob, each.rank) for name, each in one.items()} == {
            name: (each.logprob, each.rank) for name, each in other.items()
        }


def test_processed_readings_show_what_is_ruled_out(llm: LLM) -> None:
    params = drawing(choice=["a", "b"])
    params.logprobs_mode, params.logprobs, params.temperature = "processed_logprobs", -1, 0
    (output,) = llm.generate(["x"], params, use_tqdm=False)
    first = output.outputs[0].logprobs[0]
    left = {token_id for token_id, each in first.items() if each.logprob > float("-inf")}
    assert {llm.get_tokenizer().decode([token_id]) for token_id in left} == {"a", "b"}


@pytest.fixture(scope="module")
def hf_model(folder: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


@pytest.mark.parametrize("ranks", [1, 2])
def test_the_allowed_mass_is_the_sum_of_allowed_probabilities(
    folder: Path, llm: LLM, hf_model: Any, ranks: int
) -> None:
    engine = llm if ranks == 1 else make_tiny_llm(folder, tensor_parallel_size=2)
    form = StructuredOutputsParams(regex="([ab]|th){2,3}")
    params = SamplingParams(
        temperature=1.0, seed=2, max_tokens=9, structured_outputs=form, grammar_readings=True,
        logprobs=-1, logprobs_mode="processed_logprobs",
    )  # fmt: skip
    free = SamplingParams(temperature=0, max_tokens=4)
    output, other = engine.generate(["hello", "x"], [params, free], use_tqdm=False)
    (choice,) = output.outputs
    assert choice.finish_reason == "stop" and other.outputs[0].allowed_mass is None
    prompt = output.prompt_token_ids
    with torch.inference_mode():
        logits = hf_model(torch.tensor([[*prompt, *choice.token_ids]])).logits[0, len(prompt) - 1 : -1]
    assert len(choice.allowed_mass) == len(choice.token_ids) == len(choice.logprobs)
    for mass, row, shown in zip(choice.allowed_mass, logits.double().softmax(-1), choice.logprobs, strict=True):
        allowed = [token_id for token_id, each in shown.items() if each.logprob > float("-inf")]
        assert mass == pytest.approx(row[allowed].sum().item(), abs=1e-5)
    assert choice.allowed_mass_total == pytest.approx(sum(map(math.log, choice.allowed_mass)), abs=1e-4)


def test_deltas_have_their_own_masses(llm: LLM) -> None:
    fields = {"temperature": 0, "max_tokens": 9, "structured_outputs": {"regex": "[ab]{4}"}, "grammar_readings": True}
    (whole,) = llm.generate(["x"], SamplingParams(**fields), use_tqdm=False)
    engine, parts = llm.llm_engine, []
    engine.add_request("delta", "x", SamplingParams(**fields, output_kind=RequestOutputKind.DELTA))
    while engine.has_unfinished_requests():
        parts += [each.outputs[0] for each in engine.step()]
    assert [mass for part in parts for mass in part.allowed_mass] == whole.outputs[0].allowed_mass
    assert parts[-1].allowed_mass_total == whole.outputs[0].allowed_mass_total
    with pytest.raises(VLLMValidationError, match="grammar_readings need structured_outputs"):
        SamplingParams(grammar_readings=True)


def test_what_else_limits_the_answer(llm: LLM) -> None:
    tokenizer = llm.get_tokenizer()
    (a,) = tokenizer.encode("a")
    bias = drawing(choice=["a", "b"])
    bias.logit_bias = {a: -100.0}
    assert texts(llm, ["x", "y"], bias) == ["b", "b"]
    allowed = drawing(choice=["a", "b"])
    allowed.allowed_token_ids = [a, 2]
    assert texts(llm, ["x"], allowed) == ["a"]
    words = SamplingParams(temperature=0, max_tokens=9, bad_words=["a"], structured_outputs={"choice": ["a", "b"]})
    assert texts(llm, ["x"], words) == ["b"]
    stop = SamplingParams(temperature=0, max_tokens=9, stop=["5"], structured_outputs={"regex": "1234567"})
    assert texts(llm, ["x"], stop) == ["1234"]
    cut = SamplingParams(temperature=0, max_tokens=3, structured_outputs={"regex": "1234567"})
    (output,) = llm.generate(["x"], cut, use_tqdm=False)
    assert (output.outputs[0].text, output.outputs[0].finish_reason) == ("123", "length")


def test_after_the_answer_nothing_but_its_end_comes(llm: LLM) -> None:
    params = SamplingParams(temperature=0, max_tokens=5, ignore_eos=True, structured_outputs={"choice": ["ab"]})
    (output,) = llm.generate(["x"], params, use_tqdm=False)
    assert output.outputs[0].text == "ab" and set(output.outputs[0].token_ids[2:]) == {2}


def test_preempted_requests_go_on_where_they_were(folder: Path) -> None:
    roomy = make_tiny_llm(folder)
    tight = make_tiny_llm(folder, num_gpu_blocks_override=12, max_num_seqs=6)
    prompts = [f"{index} prompt" for index in range(6)]
    params = [
        SamplingParams(temperature=1.0, seed=index, max_tokens=60, structured_outputs={"regex": "([0-9][ab]){25}"})
        for index in range(6)
    ]
    found = texts(tight, prompts, params)
    assert tight.llm_engine.engine_core.scheduler.num_preemptions > 0
    assert found == texts(roomy, prompts, params)
    assert all(re.fullmatch("([0-9][ab]){25}", text) for text in found)
    assert is_empty(tight)


def test_two_ranks_draw_the_same(folder: Path, llm: LLM) -> None:
    pair = make_tiny_llm(folder, tensor_parallel_size=2)
    prompts = ["a", "hello"]
    for form in FORMS:
        params = [drawing(seed=index, **form) for index in range(2)]
        assert texts(pair, prompts, params) == texts(llm, prompts, params)


@pytest.mark.parametrize(
    ("form", "says"),
    [
        ({"regex": "("}, "structured_outputs.regex does not compile: .*unclosed group"),
        ({"json": {"type": "object", "unevaluatedProperties": False}}, "unevaluatedProperties"),
    ],
)
def test_a_form_that_does_not_compile_is_refused_before_anything_runs(llm: LLM, form: Any, says: str) -> None:
    with pytest.raises(VLLMValidationError, match=says) as caught:
        llm.generate(["a", "b"], [drawing(), drawing(**form)], use_tqdm=False)
    assert caught.value.parameter == "structured_outputs"
    assert is_empty(llm)


def test_what_cannot_be_had_together_is_refused(folder: Path, llm: LLM) -> None:
    form = StructuredOutputsParams(regex="a")
    with pytest.raises(VLLMValidationError, match="needs structured_outputs=None"):
        SamplingParams(structured_outputs=form, trace_decode_token_ids=[3])
    for name, own in (("grammar", form), ("choice", {"choice": ["a"]}), ("field", {"json": {"const": 1}})):
        beams = {"use_beam_search": True, "n": 2, "temperature": 0, f"{name}_readings": True}
        with pytest.raises(VLLMValidationError, match=f"needs {name}_readings=False"):
            SamplingParams(structured_outputs=own, **beams)
    bare = make_tiny_llm(folder, skip_tokenizer_init=True)
    with pytest.raises(VLLMValidationError, match="skip_tokenizer_init left the tokenizer out"):
        bare.generate([[3, 4]], SamplingParams(structured_outputs=form), use_tqdm=False)
