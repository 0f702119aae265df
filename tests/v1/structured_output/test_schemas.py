"""Schemas that are changed before they compile: parts that become one, nulls, white space; against `jsonschema`."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest
from grammar_walks import accepts, byte_grammars, random_answer
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm.answers.grammars.calls import CallableFunction, bound_schema
from vllm.sampling_params import StructuredOutputsParams
from vllm.v1.structured_output.fields import finite_fields
from vllm.v1.structured_output.grammar import grammar_text, schema_of
from vllm.v1.structured_output.matcher import Grammars
from vllm.v1.structured_output.schemas import closed_schema, compilable

pytest.importorskip("llguidance")
jsonschema = pytest.importorskip("jsonschema")


@pytest.fixture(scope="module")
def grammars(tmp_path_factory: pytest.TempPathFactory) -> Grammars:
    return byte_grammars(tmp_path_factory.mktemp("bytes"))


def holds(grammars: Grammars, value: Any, schema: Any, **more: Any) -> bool:
    params = StructuredOutputsParams(json=schema, **({"disable_any_whitespace": True} | more))
    text = json.dumps(value, separators=(",", ":"), ensure_ascii=False)
    return accepts(grammars.start(grammar_text(params)), text)


def an_object(required: bool = True, **properties: Any) -> dict[str, Any]:
    schema = {"type": "object", "properties": properties}
    return {**schema, "required": list(properties)} if required else schema


INTEGER, WORD, FLAG = {"type": "integer"}, {"enum": ["x", "y"]}, {"type": "boolean"}
A, B, C = an_object(a=INTEGER), an_object(b=WORD), an_object(c=FLAG)
DEFINED = {"$defs": {"A": A, "B": B, "C": {"allOf": [{"$ref": "#/$defs/A"}, {"$ref": "#/$defs/B"}]}}}


@pytest.mark.parametrize(
    ("schema", "held", "others"),
    [
        ({"allOf": [A, B]}, [{"a": 1, "b": "x"}], [{"a": 1}, {"b": "x"}, {"a": 1, "b": "x", "c": 1}]),
        ({"allOf": [A, {"allOf": [B, an_object(False, c=FLAG)]}]}, [{"a": 1, "b": "x", "c": True}], [{"a": 1}]),
        ({**DEFINED, "allOf": [{"$ref": "#/$defs/A"}, {"$ref": "#/$defs/B"}]}, [{"a": 1, "b": "y"}], [{"a": 1}]),
        ({**DEFINED, "allOf": [{"$ref": "#/$defs/A"}], **an_object(c=FLAG)}, [{"c": True, "a": 1}], [{"a": 1}]),
        ({**DEFINED, "$ref": "#/$defs/A", **an_object(c=FLAG)}, [{"c": True, "a": 1}], [{"c": True}]),
        ({**DEFINED, **an_object(p={"$ref": "#/$defs/C"})}, [{"p": {"a": 1, "b": "x"}}], [{"p": {"a": 1}}]),
        ({**DEFINED, **an_object(p={"allOf": [{"$ref": "#/$defs/A"}], "title": "P"})}, [{"p": {"a": 1}}], [{"p": {}}]),
        ({**A, "anyOf": [B, C]}, [{"a": 1, "b": "x"}, {"a": 1, "c": True}], [{"a": 1}, {"b": "x"}]),
        ({"type": "object", "anyOf": [A, B]}, [{"a": 1}, {"b": "x"}], [{}, {"a": 1, "b": "x"}]),
        ({"type": "object", "oneOf": [A, an_object(a=WORD)]}, [{"a": 1}, {"a": "x"}], [{}]),
        ({"anyOf": [A, B]}, [{"a": 1}, {"b": "x"}], [{"a": 1, "b": "x"}]),
        (
            {"type": "object", "allOf": [{"anyOf": [A, B]}, {"anyOf": [an_object(c=FLAG)]}]},
            [{"a": 1, "c": True}],
            [{"a": 1}],
        ),
        ({"allOf": [A, an_object(b={"$ref": "#/allOf/0/properties/a"})]}, [{"a": 1, "b": 2}], [{"a": 1, "b": "x"}]),
        ({"allOf": [A, {**an_object(a=INTEGER), "additionalProperties": True}]}, [{"a": 1, "z": 2}], [{}]),
        ({"allOf": [A, an_object(False, a={"minimum": 3})]}, [{"a": 3}], [{"a": 2}, {"a": "x"}]),
        (
            {"allOf": [{"type": "object", "patternProperties": {"^x": FLAG}}, A]},
            [{"a": 1, "x1": True}],
            [{"a": 1, "y": 1}],
        ),
        ({"type": ["object", "null"], "properties": {"a": INTEGER}}, [None, {}, {"a": 1}], [{"b": 1}]),
        (an_object(n={"anyOf": [{"$ref": "#"}, {"type": "null"}]}), [{"n": {"n": None}}], [{"n": {"n": None, "m": 1}}]),
    ],
)
def test_parts_are_closed_as_one(grammars: Grammars, schema: Any, held: list[Any], others: list[Any]) -> None:
    options = {"disable_additional_properties": True}
    assert [each for each in held if not holds(grammars, each, schema, **options)] == []
    assert [each for each in others if holds(grammars, each, schema, **options)] == []
    for each in held:
        jsonschema.validate(each, schema)
    if all(isinstance(each, dict) for each in held):
        # Forced calls are closed alike.
        forced = bound_schema(CallableFunction("f", schema))
        assert [each for each in held if not holds(grammars, each, forced)] == []
        assert [each for each in others if holds(grammars, each, forced)] == []


PROPERTIES = st.dictionaries(
    st.sampled_from("abc"),
    st.sampled_from([INTEGER, WORD, FLAG, {"minimum": 2}, {"type": ["integer", "null"]}]),
    max_size=2,
)
OBJECTS = st.builds(
    lambda properties, required, more: {"type": "object", "properties": properties, "required": required, **more},
    PROPERTIES,
    st.lists(st.sampled_from("abc"), max_size=1),
    st.sampled_from([{}, {}, {"additionalProperties": False}, {"additionalProperties": INTEGER}]),
)
SCHEMAS = st.recursive(
    OBJECTS,
    lambda inner: st.one_of(
        st.lists(inner, min_size=1, max_size=3).map(lambda parts: {"allOf": parts}),
        st.builds(lambda own, parts: {**own, "anyOf": parts}, OBJECTS, st.lists(inner, min_size=1, max_size=2)),
    ),
    max_leaves=5,
)
VALUES = st.dictionaries(st.sampled_from("abcd"), st.sampled_from([1, 2, "x", True, None]), max_size=3)


def _names(schema: Any) -> set[str]:
    if isinstance(schema, list):
        return set().union(*map(_names, schema))
    inner = [schema.get("allOf", []), schema.get("anyOf", [])] if isinstance(schema, dict) else []
    return set(schema.get("properties", ())).union(*map(_names, inner)) if isinstance(schema, dict) else set()


@settings(max_examples=150, deadline=None)
@given(schema=SCHEMAS, value=VALUES, seed=st.integers(0, 9))
def test_closing_takes_nothing_but_what_no_part_names(grammars: Grammars, schema: Any, value: Any, seed: int) -> None:
    closed = closed_schema(schema)
    is_valid = jsonschema.Draft202012Validator(schema).is_valid
    if jsonschema.Draft202012Validator(closed).is_valid(value):
        assert is_valid(value)
    elif is_valid(value) and "anyOf" not in str(schema):
        assert not value.keys() <= _names(schema)
    try:
        matcher = grammars.start(grammar_text(StructuredOutputsParams(json=closed, disable_any_whitespace=True)))
    except ValueError as error:
        assert "Unsatisfiable" in str(error) or "unsatisfiable" in str(error)
        return
    answer = random_answer(matcher, random.Random(seed))
    assert answer is None or is_valid(json.loads(answer))


def test_null_is_what_is_left_out(grammars: Grammars) -> None:
    nulls = dict.fromkeys(
        "required enum minimum pattern format anyOf allOf $ref items additionalProperties title".split()
    )
    inner = {
        "type": "object",
        "properties": {"b": {"const": None}, "c": {"enum": [None, 1]}, "d": {**INTEGER, **nulls}},
        **nulls,
    }
    schema = {"type": "object", "properties": {"a": inner, "e": {"type": "array", **nulls, "items": INTEGER}}, **nulls}
    value = {"a": {"b": None, "c": None, "d": 1}, "e": [1]}
    for each in (schema, json.dumps(schema)):
        assert holds(grammars, value, each)
        assert holds(grammars, value, each, disable_additional_properties=True)
    assert not holds(grammars, {"a": {"b": 1}}, schema)
    assert not holds(grammars, {"a": {"d": "x"}}, schema)
    assert holds(grammars, value, bound_schema(CallableFunction("f", schema)))
    found = finite_fields(schema_of(StructuredOutputsParams(json=schema)), json.dumps(value).encode())
    assert [(each.path, each.values) for each in found] == [("$.a.b", [None]), ("$.a.c", [None, 1])]


def test_patterns_that_become_one(grammars: Grammars) -> None:
    schema = {
        "type": "object",
        "patternProperties": {r"^\d$": {"minimum": 3}, "^[0-9]$": INTEGER},
        "additionalProperties": False,
    }
    assert holds(grammars, {"1": 3}, schema)
    assert not holds(grammars, {"1": 2}, schema)
    assert not holds(grammars, {"1": "x"}, schema)


def test_alternatives_do_not_grow_without_bound() -> None:
    pairs = [{"anyOf": [an_object(**{f"a{index}": INTEGER}), an_object(**{f"b{index}": FLAG})]} for index in range(20)]
    with pytest.raises(ValueError, match="too many alternatives"):
        closed_schema({"type": "object", "allOf": pairs})


def test_compilable_twice_is_the_same() -> None:
    schema = {"type": "string", "pattern": r"^\w[\d.]$", "format": "none", "minLength": None}
    assert (
        compilable(compilable(schema)) == compilable(schema) == {"type": "string", "pattern": "^[0-9A-Za-z_][[0-9].]$"}
    )
