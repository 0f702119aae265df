"""The shape that an answer is to have: values that hold one kind, refused with what to do instead."""

from __future__ import annotations

import pytest
from pydantic import BaseModel

from vllm.exceptions import VLLMValidationError
from vllm.params.structured import (
    GuidedDecodingParams,
    RepetitionDetectionParams,
    StructuredOutputsParams,
    is_neutral,
)


@pytest.mark.parametrize("fields", [{}, {"json": "{}", "regex": "a"}, {"disable_any_whitespace": True}])
def test_exactly_one_kind(fields):
    with pytest.raises(VLLMValidationError, match="exactly one of json, regex"):
        StructuredOutputsParams(**fields)


def test_asking_what_is_given():
    tag = StructuredOutputsParams(structural_tag="{}")
    assert not tag.all_constraints_none()
    assert tag.all_non_structural_tag_constraints_none()
    assert not StructuredOutputsParams(regex="a").all_non_structural_tag_constraints_none()


def test_the_older_name_may_be_empty():
    assert is_neutral(None)
    assert is_neutral(GuidedDecodingParams())
    assert not is_neutral(GuidedDecodingParams(choice=["a"]))
    with pytest.raises(VLLMValidationError, match="at most one"):
        GuidedDecodingParams(choice=["a"], regex="a")


def test_from_optional():
    class Answer(BaseModel):
        label: str

    assert GuidedDecodingParams.from_optional(backend="xgrammar") is None
    assert GuidedDecodingParams.from_optional(choice=["a"], backend="x") == GuidedDecodingParams(
        choice=["a"], backend="x"
    )
    made = GuidedDecodingParams.from_optional(json=Answer)
    assert made is not None and made.json == Answer.model_json_schema()


@pytest.mark.parametrize(
    "fields",
    [{"json": 7}, {"regex": 7}, {"choice": []}, {"choice": ["a", 7]}, {"choice": "ab"}, {"grammar": {}},
     {"json_object": "yes"}, {"regex": "a", "disable_any_whitespace": 1}, {"json": {}, "whitespace_pattern": 7}],
)  # fmt: skip
def test_types_of_the_kinds(fields):
    with pytest.raises(VLLMValidationError, match="structured_outputs.") as caught:
        StructuredOutputsParams(**fields)
    assert caught.value.parameter == "structured_outputs"


def test_a_class_stands_for_its_schema():
    class Answer(BaseModel):
        label: str

    assert StructuredOutputsParams(json=Answer).json == Answer.model_json_schema()


@pytest.mark.parametrize("fields", [(-1,), (2, 3, 2), (3, 1, 1)])
def test_repetition_detection_checks_its_numbers(fields):
    RepetitionDetectionParams()
    RepetitionDetectionParams(3, 1, 2)
    with pytest.raises(VLLMValidationError):
        RepetitionDetectionParams(*fields)
