"""A form's alternatives are read exactly: every choice, and every value of a field, against transformers."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from byte_tokenizer import VOCAB_SIZE, make_byte_tokenizer
from models_util import make_random_model
from tiny_llm import is_empty, make_tiny_llm
from transformers import AutoModelForCausalLM

from vllm import LLM, SamplingParams
from vllm.exceptions import VLLMValidationError
from vllm.outputs import ValueReadings
from vllm.params.structured import Thinking
from vllm.sampling_params import RequestOutputKind, StructuredOutputsParams
from vllm.v1.engine.core import EngineCore

pytest.importorskip("llguidance")

# Tokens across the borders of JSON's values.
MERGES = [("Ġ", '"'), ('"', "}"), ("Ġ", "t"), ("Ġt", "r"), ("Ġ", "f"), ("s", "e"), ('"', ","), ("[", '"')]
CHOICES = ["the", "them", "stop", " the", "日本", "日", "a\\b"]
SCHEMA = {
    "type": "object",
    "properties": {
        "mood": {"enum": ["the", "then", "日本", 'q"\\\n', "the end"]},
        "sure": {"type": "boolean"},
        "inner": {"$ref": "#/$defs/Inner"},
        "tags": {"type": "array", "items": {"enum": ["a", "ab", None]}, "minItems": 2, "maxItems": 2},
        "free": {"type": "string", "maxLength": 2},
        "last": {"anyOf": [{"const": 1}, {"const": 10}, {"type": "null"}]},
    },
    "required": ["mood", "sure", "inner", "tags", "free", "last"],
    "additionalProperties": False,
    "$defs": {
        "Inner": {
            "type": "object",
            "properties": {"n": {"enum": [1.5, 2, -3]}},
            "required": ["n"],
            "additionalProperties": False,
        }
    },
}
PATHS = ["$.mood", "$.sure", "$.inner.n", "$.tags[0]", "$.tags[1]", "$.last"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    make_random_model("llama", "small", folder, vocab_size=VOCAB_SIZE + len(MERGES))
    make_byte_tokenizer(folder, MERGES)
    return folder


@pytest.fixture(scope="module")
def llm(folder: Path) -> LLM:
    return make_tiny_llm(folder, max_model_len=256)


@pytest.fixture(scope="module")
def hf_model(folder: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


def forced(model: Any, prompt: Sequence[int], continuation: Sequence[int]) -> float:
    with torch.inference_mode():
        logprobs = model(torch.tensor([[*prompt, *continuation]])).logits[0].double().log_softmax(-1)
    rows = logprobs[len(prompt) - 1 : -1]
    return sum(row[token].item() for row, token in zip(rows, continuation, strict=True))


def check_values(model: Any, prompt: Sequence[int], readings: ValueReadings) -> None:
    expected = [forced(model, prompt, ids) for ids in readings.token_ids]
    assert readings.logprobs.tolist() == pytest.approx(expected, abs=1e-4)
    total = math.fsum(map(math.exp, expected))
    assert readings.shares.tolist() == pytest.approx([math.exp(each) / total for each in expected], abs=1e-4)


def choosing(**more: Any) -> SamplingParams:
    form = StructuredOutputsParams(choice=CHOICES)
    return SamplingParams(**{"temperature": 0, "max_tokens": 20, **more}, structured_outputs=form, choice_readings=True)


def filling(schema: Any = SCHEMA, **more: Any) -> SamplingParams:
    form = StructuredOutputsParams(json=schema)
    return SamplingParams(**{"temperature": 1, "max_tokens": 240, **more}, structured_outputs=form, field_readings=True)


def test_every_choice_has_its_logprob(llm: LLM, hf_model: Any) -> None:
    greedy, drawn = llm.generate(["hello"] * 2, [choosing(), choosing(temperature=1, n=3, seed=1)], use_tqdm=False)
    tokenizer = llm.get_tokenizer()
    for choice in (*greedy.outputs, *drawn.outputs):
        readings = choice.choice_readings
        assert readings.values == readings.texts == CHOICES
        assert readings.token_ids == [tokenizer.encode(each, add_special_tokens=False) for each in CHOICES]
        check_values(hf_model, greedy.prompt_token_ids, readings)
        assert choice.text == CHOICES[readings.chosen]
        assert choice.field_readings is None
    assert is_empty(llm)


def test_readings_are_what_score_labels_reads(llm: LLM) -> None:
    (output,) = llm.generate(["hello"], choosing(max_tokens=0), use_tqdm=False)
    (scores,) = llm.score_labels(["hello"], CHOICES, use_tqdm=False)
    readings = output.outputs[0].choice_readings
    assert readings.chosen is None and output.outputs[0].token_ids == []
    assert readings.logprobs.tolist() == pytest.approx(scores.logprobs.tolist(), abs=1e-5)


@pytest.mark.parametrize("compact", [True, False], ids=["compact", "spaced"])
def test_every_field_has_its_distribution(llm: LLM, hf_model: Any, compact: bool) -> None:
    params = filling(n=2, seed=3)
    params.structured_outputs.disable_any_whitespace = compact
    if not compact:
        params.structured_outputs.whitespace_pattern = " "
    (output,) = llm.generate(["hello"], params, use_tqdm=False)
    tokenizer = llm.llm_engine.tokenizer
    for choice in output.outputs:
        assert choice.finish_reason == "stop"
        answer = json.loads(choice.text)
        assert list(choice.field_readings) == PATHS
        chosen = {path: each.values[each.chosen] for path, each in choice.field_readings.items()}
        assert list(chosen.values()) == [
            answer["mood"], answer["sure"], answer["inner"]["n"], *answer["tags"], answer["last"]
        ]  # fmt: skip
        for start, readings in zip(value_starts(choice.text), choice.field_readings.values(), strict=True):
            prefix, before = tokens_before(tokenizer, choice.token_ids, start)
            for value, text, ids in zip(readings.values, readings.texts, readings.token_ids, strict=True):
                assert text.startswith(before) and json.loads(text.removeprefix(before)) == value
                assert b"".join(map(tokenizer.token_bytes, ids)).decode() == text
            assert choice.text.encode()[start - len(before) :].startswith(readings.texts[readings.chosen].encode())
            check_values(hf_model, [*output.prompt_token_ids, *prefix], readings)
    assert is_empty(llm)


def value_starts(text: str) -> list[int]:
    """Bytes of an answer of SCHEMA where the values of PATHS begin."""
    keys = ("mood", "sure", "n", "tags")
    found = [re.search(rf'"{key}"\s*:\s*(\[\s*)?', text) for key in (*keys, "last")]
    second = re.compile(r'("\w+"|null)\s*,\s*').match(text, found[3].end())
    return [len(text[: each.end()].encode()) for each in (*found[:4], second, found[4])]


def tokens_before(tokenizer: Any, token_ids: Sequence[int], start: int) -> tuple[list[int], str]:
    """The whole tokens before a byte of the text, and the text from their end to it."""
    size = 0
    for count, token_id in enumerate(token_ids):
        piece = tokenizer.token_bytes(token_id)
        if size + len(piece) > start:
            return list(token_ids[:count]), piece[: start - size].decode()
        size += len(piece)
    raise AssertionError("the text ends before it")


def test_borders_within_tokens_do_occur(llm: LLM) -> None:
    """So that the test above says something of them."""
    params = filling(n=2, seed=3)
    params.structured_outputs.whitespace_pattern = " "
    (output,) = llm.generate(["hello"], params, use_tqdm=False)
    all_readings = [each for choice in output.outputs for each in choice.field_readings.values()]
    assert {each.texts[0][0] for each in all_readings} >= {" "}


def test_a_form_changes_nothing_that_was_drawn(llm: LLM) -> None:
    params = filling(seed=5, logprobs=3)
    plain = params.clone()
    plain.field_readings = False
    one, other = (llm.generate(["hello"], own, use_tqdm=False)[0].outputs[0] for own in (params, plain))
    assert one.token_ids == other.token_ids and one.logprobs == other.logprobs
    assert other.field_readings is None


def test_an_answer_that_breaks_off_has_its_fields_so_far(llm: LLM) -> None:
    (whole,) = llm.generate(["hello"], filling(seed=5), use_tqdm=False)
    (part,) = llm.generate(["hello"], filling(seed=5, max_tokens=24), use_tqdm=False)
    full, fields = whole.outputs[0].field_readings, part.outputs[0].field_readings
    assert part.outputs[0].finish_reason == "length" and 0 < len(fields) < len(full)
    for path, readings in fields.items():
        assert readings.logprobs.tolist() == pytest.approx(full[path].logprobs.tolist(), abs=1e-5)
        assert readings.chosen in (None, full[path].chosen)


def test_values_that_the_context_does_not_hold_are_nan(llm: LLM) -> None:
    schema = {"enum": ["a", "b" * 300]}
    (output,) = llm.generate(["hello"], filling(schema, temperature=0), use_tqdm=False)
    readings = output.outputs[0].field_readings["$"]
    assert all(map(math.isnan, readings.logprobs)) and len(readings.values) == 2
    with pytest.raises(VLLMValidationError, match="choice_readings: the prompt has 5 tokens and choice"):
        llm.generate(["hello"], SamplingParams(choice_readings=True, structured_outputs={"choice": ["b" * 300]}))


def test_a_stream_has_them_with_its_last_chunk(llm: LLM) -> None:
    engine, parts = llm.llm_engine, []
    engine.add_request("one", "hello", choosing(n=2, temperature=1, seed=1, output_kind=RequestOutputKind.DELTA))
    while engine.has_unfinished_requests():
        parts += [each for output in engine.step() for each in output.outputs]
    (whole,) = llm.generate(["hello"], choosing(n=2, temperature=1, seed=1), use_tqdm=False)
    for expected in whole.outputs:
        own = [each for each in parts if each.index == expected.index]
        assert [each.finish_reason for each in own] == [None] * (len(own) - 1) + ["stop"]
        assert "".join(each.text for each in own) == expected.text
        assert [each.choice_readings is None for each in own] == [True] * (len(own) - 1) + [False]
        assert own[-1].choice_readings.logprobs.tolist() == expected.choice_readings.logprobs.tolist()


def test_an_aborted_request_leaves_nothing(llm: LLM) -> None:
    engine = llm.llm_engine
    engine.add_request("gone", "hello", choosing())
    while not engine.output_processor._read_for:
        engine.step()
    engine.abort_request(["gone"])
    assert not engine.has_unfinished_requests() and not engine.output_processor._read_for
    assert is_empty(llm)


@pytest.mark.parametrize(
    "fields",
    [
        {"tensor_parallel_size": 2},
        {"async_scheduling": True},
        {"enable_prefix_caching": False},
        {"num_gpu_blocks_override": 24, "max_num_seqs": 3},
    ],
    ids=lambda fields: next(iter(fields)),
)
def test_other_engines_read_the_same(folder: Path, llm: LLM, fields: dict[str, Any]) -> None:
    other = make_tiny_llm(folder, max_model_len=256, **fields)
    requests = [filling(seed=5, n=2), choosing(seed=1), filling(seed=7)]
    found, expected = (each.generate(["hello", "a", "stop"], requests, use_tqdm=False) for each in (other, llm))
    for one, wanted in zip(found, expected, strict=True):
        for own, reference in zip(one.outputs, wanted.outputs, strict=True):
            assert own.token_ids == reference.token_ids
            pairs = [(own.choice_readings, reference.choice_readings)]
            if own.field_readings is not None:
                pairs = list(zip(own.field_readings.values(), reference.field_readings.values(), strict=True))
            for mine, theirs in pairs:
                assert (mine.values, mine.texts, mine.chosen) == (theirs.values, theirs.texts, theirs.chosen)
                assert mine.logprobs.tolist() == pytest.approx(theirs.logprobs.tolist(), abs=1e-4)
    assert is_empty(other)


def test_values_are_read_together(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not by a request each, nor anew for each answer."""
    choices = [f"stop{index:02}" for index in range(40)]
    add, added = EngineCore.add_request, []
    monkeypatch.setattr(EngineCore, "add_request", lambda core, each: (added.append(each), add(core, each)))
    params = choosing(n=3, temperature=1)
    params.structured_outputs = StructuredOutputsParams(choice=choices)
    (output,) = llm.generate(["hello"], params, use_tqdm=False)
    assert len(output.outputs) == 3 and len(added) == 3 + 4


def test_requests_that_cannot_be_read_are_refused(llm: LLM) -> None:
    for name, form in (("choice_readings", {"regex": "a"}), ("field_readings", {"choice": ["a"]})):
        for given in (form, None):
            with pytest.raises(VLLMValidationError, match=f"{name} need structured_outputs"):
                SamplingParams(**{name: True}, structured_outputs=given)
    many = {"enum": [f"v{index}" for index in range(1001)]}
    with pytest.raises(VLLMValidationError, match="field_readings are of at most 1000 values, got 1001"):
        llm.generate(["hello"], filling({"properties": {"a": many}, "type": "object"}))
    with pytest.raises(VLLMValidationError, match="an empty choice has no token"):
        llm.generate(["hello"], SamplingParams(choice_readings=True, structured_outputs={"choice": ["a", ""]}))


@pytest.mark.parametrize("budget", [0, 3])
def test_forms_are_read_after_the_thinking(llm: LLM, hf_model: Any, budget: int) -> None:
    thinking = {"end": "</t>", "budget": budget}
    params = [choosing(temperature=1, seed=3), filling(SCHEMA["properties"]["mood"], seed=3)]
    for own in params:
        own.structured_outputs.thinking = Thinking(**thinking)
    chosen, filled = llm.generate(["hello"] * 2, params, use_tqdm=False)
    for output, readings in (
        (chosen, chosen.outputs[0].choice_readings),
        (filled, filled.outputs[0].field_readings["$"]),
    ):
        (choice,) = output.outputs
        answer = choice.text.partition("</t>")[2]
        assert answer == readings.texts[readings.chosen] and len(readings.values) > 4
        # The end is spelled by the byte.
        size = budget + len("</t>")
        assert llm.get_tokenizer().decode(choice.token_ids[size:-1]) == answer
        check_values(hf_model, [*output.prompt_token_ids, *choice.token_ids[:size]], readings)
    unfinished = choosing(max_tokens=2)
    unfinished.structured_outputs.thinking = Thinking("</t>")
    (output,) = llm.generate(["hello"], unfinished, use_tqdm=False)
    assert output.outputs[0].choice_readings is None
