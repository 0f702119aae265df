"""LLM.generate with each kind of structured_outputs, by each name of the backend."""

from __future__ import annotations

import enum
import json
import re
from pathlib import Path
from typing import Any

import pydantic
import pytest
from tiny_llm import is_empty, make_tiny_llm

from vllm import LLM, SamplingParams
from vllm.sampling_params import GuidedDecodingParams, StructuredOutputsParams

pytest.importorskip("llguidance")

IPV4 = r"((25[0-5]|(2[0-4]|1\d|[1-9]|)\d)\.){3}(25[0-5]|(2[0-4]|1\d|[1-9]|)\d)"
GBNF = 'root ::= "SELECT " column " from " table\ncolumn ::= "a" | "b"\ntable ::= "t" [0-9]'
LARK = 'start: "SELECT " column " from " "t" /[0-9]/\ncolumn: "a" | "b"'
SELECT = "SELECT [ab] from t[0-9]"


class Kind(str, enum.Enum):
    sedan = "sedan"
    truck = "truck"


class Car(pydantic.BaseModel):
    kind: Kind
    doors: int = pydantic.Field(ge=2, le=5)


@pytest.fixture(scope="module", params=["auto", "guidance"])
def llm(folder: Path, request: pytest.FixtureRequest) -> LLM:
    config = {"backend": request.param, "disable_any_whitespace": True, "disable_additional_properties": True}
    return make_tiny_llm(folder, structured_outputs_config=config)


def texts(llm: LLM, form: Any, **fields: Any) -> list[str]:
    params = SamplingParams(temperature=1.0, seed=0, max_tokens=80, structured_outputs=form, **fields)
    outputs = llm.generate(["one", "two"], params, use_tqdm=False)
    assert is_empty(llm)
    assert {choice.finish_reason for output in outputs for choice in output.outputs} == {"stop"}
    return [choice.text for output in outputs for choice in output.outputs]


@pytest.mark.parametrize(
    "schema", [Car, Car.model_json_schema(), json.dumps(Car.model_json_schema())], ids=["class", "object", "text"]
)
def test_json(llm: LLM, schema: Any) -> None:
    for text in texts(llm, StructuredOutputsParams(json=schema), n=2):
        assert set(Car.model_validate_json(text).model_dump()) == {"kind", "doors"}
        assert not re.search(r"\s", text)


def test_regex(llm: LLM) -> None:
    assert all(re.fullmatch(IPV4, text) for text in texts(llm, StructuredOutputsParams(regex=IPV4)))


def test_choice(llm: LLM) -> None:
    assert set(texts(llm, StructuredOutputsParams(choice=["Python", "C++"]), n=3)) <= {"Python", "C++"}


@pytest.mark.parametrize("grammar", [GBNF, LARK], ids=["gbnf", "lark"])
def test_grammar(llm: LLM, grammar: str) -> None:
    assert all(re.fullmatch(SELECT, text) for text in texts(llm, StructuredOutputsParams(grammar=grammar)))


def test_structural_tag(llm: LLM) -> None:
    structure = {"begin": "<f=a>", "schema": {"type": "object", "properties": {"n": {"enum": [1]}}}, "end": "</f>"}
    tag = json.dumps({"structures": [structure], "triggers": ["<f="]})
    form = StructuredOutputsParams(structural_tag=tag)
    params = SamplingParams(temperature=1.0, max_tokens=40, structured_outputs=form)
    for output in llm.generate(["one", "two"], params, use_tqdm=False):
        for held in re.findall("<f=a>(.*?)</f>", output.outputs[0].text):
            assert json.loads(held) in ({}, {"n": 1})


def test_the_older_name(llm: LLM) -> None:
    params = SamplingParams(max_tokens=20, guided_decoding=GuidedDecodingParams(choice=["x", "y"]))
    outputs = llm.generate(["one", "two"], params, use_tqdm=False)
    assert {output.outputs[0].text for output in outputs} <= {"x", "y"}


def test_a_list_of_params(llm: LLM) -> None:
    forms = [StructuredOutputsParams(choice=["x"]), None, StructuredOutputsParams(regex="[0-9]{2}")]
    params = [SamplingParams(temperature=0, max_tokens=5, structured_outputs=form) for form in forms]
    found = [output.outputs[0].text for output in llm.generate(["a", "b", "c"], params, use_tqdm=False)]
    assert found[0] == "x" and re.fullmatch("[0-9]{2}", found[2])


@pytest.mark.parametrize(
    ("form", "says"),
    [
        ({"json": {"type": "array", "uniqueItems": True}}, "uniqueItems"),
        ({"grammar": "root ::= missing"}, "missing has no rule"),
        ({"regex": "[a-"}, "regex"),
    ],
)
def test_what_does_not_compile_is_an_error_of_the_call(llm: LLM, form: Any, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        texts(llm, StructuredOutputsParams(**form))
    assert is_empty(llm)
    assert texts(llm, StructuredOutputsParams(choice=["ok"])) == ["ok", "ok"]
