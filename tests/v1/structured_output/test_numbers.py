"""Numbers in schemas, of any size and number of digits, against decimals and `jsonschema`."""

from __future__ import annotations

import json
import random
import re
from decimal import Decimal
from typing import Any

import pytest
from grammar_walks import accepts, byte_grammars, random_answer
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm.answers.grammars.calls import CallableFunction, grammar_of, schema_text
from vllm.answers.grammars.calls import bound_schema as bound
from vllm.exceptions import VLLMValidationError
from vllm.sampling_params import StructuredOutputsParams
from vllm.v1.structured_output.grammar import grammar_text
from vllm.v1.structured_output.matcher import Grammars
from vllm.v1.structured_output.numbers import is_empty, number_expressions

pytest.importorskip("llguidance")
jsonschema = pytest.importorskip("jsonschema")

BIG = 2**53 + 1  # no double


@pytest.fixture(scope="module")
def grammars(tmp_path_factory: pytest.TempPathFactory) -> Grammars:
    return byte_grammars(tmp_path_factory.mktemp("bytes"))


def held(grammars: Grammars, texts: list[str], **form: Any) -> list[str]:
    grammar = grammar_text(StructuredOutputsParams(**form))
    return [text for text in texts if accepts(grammars.start(grammar), text)]


def an_object(**properties: Any) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "required": list(properties)}


SHARE = {"type": "number", "minimum": 0.05, "maximum": 0.95}
LIST = {"type": "array", "items": {"type": "number", "maximum": 0.25}}
REST = {"anyOf": [{"$ref": "#"}, {"type": "null"}], "title": "the rest"}
TREE = an_object(v={"type": "number", "exclusiveMinimum": 0}, n=REST)
PAIR = {"type": "array", "prefixItems": [SHARE, {"const": "x"}], "items": False}
BOTH = an_object(a=SHARE, b={"const": BIG})
OPEN = {"type": "object", "properties": {"a": SHARE, "b": {"type": "null"}}}
NAMED = {
    "$defs": {"P": SHARE},
    **an_object(a={"$ref": "#/$defs/P"}, b={"allOf": [{"$ref": "#/$defs/P"}], "title": "B"}),
}

CASES: list[tuple[Any, str, str]] = [
    ({"type": "number", "maximum": 0.25}, "0.2 0.25 0.250 0 0.0 0.24 -7.5", "0.26 0.251 1 0.3"),
    ({"type": "number", "minimum": 0.25}, "0.25 0.3 0.250 12 1.5", "0.2 0 0.249 -1"),
    ({"type": "number", "exclusiveMaximum": 0.25}, "0.2 0.24 0.249 -0.25", "0.25 0.250 0.3"),
    ({"type": "number", "exclusiveMinimum": 0}, "0.20 0.01 3", "0 0.0 -1"),
    ({"type": "number", "exclusiveMinimum": 0, "exclusiveMaximum": 0.25}, "0.2 0.01", "0 0.0 0.25"),
    ({"type": "number", "exclusiveMinimum": 1, "exclusiveMaximum": 2}, "1.20 1.5 1.250", "1 2 1.0 2.0"),
    ({"type": "number", "minimum": -0.25, "maximum": 1.255}, "-0.2 -0.25 1.2 1.25 1.255 0", "-0.26 1.256 -1"),
    ({"type": "number", "minimum": -1.25, "maximum": -0.05}, "-1.2 -0.1 -0.05 -1.250", "-1.3 -0.04 0 1"),
    ({"type": "number", "minimum": 1e-3, "maximum": 2.5e-1}, "0.001 0.2 0.25", "0.0009 0.26"),
    ({"type": ["number", "null"], "maximum": 0.25}, "0.2 null", '0.26 "x"'),
    ({"maximum": 0.25}, '0.2 "x" null [1] {"a":9}', "0.26"),
    ({"type": "number", "multipleOf": 0.25}, "0.5 0.25 1 1.0 1.5 -0.75", "0.3 0.2"),
    ({"type": "number", "multipleOf": 0.05, "minimum": 0}, "0.5 0.55 1", "0.56 -0.05"),
    ({"type": "number", "multipleOf": 0.25, "maximum": 1.25}, "0.5 1.25 1 0.75", "1.5 1.2"),
    ({"const": BIG}, f"{BIG}", f"{BIG - 1} {BIG + 1} 9"),
    ({"const": -BIG}, f"-{BIG}", f"-{BIG - 1} {BIG}"),
    ({"enum": [BIG, 2**64, "x", 5]}, f'{BIG} {2**64} "x" 5', f"{BIG - 1} {2**64 + 1} 6"),
    ({"type": "integer", "enum": [BIG, 1]}, f"{BIG} 1", f"{BIG + 1}"),
    ({"type": "integer", "minimum": BIG}, f"{BIG} {10**30}", f"{BIG - 1} 5"),
    ({"type": "integer", "maximum": -BIG}, f"-{BIG} -{10**30}", f"-{BIG - 1} 5"),
    ({"type": "integer", "exclusiveMinimum": BIG}, f"{BIG + 1}", f"{BIG}"),
    ({"type": "integer", "minimum": 2**63, "maximum": 2**64}, f"{2**63} {2**64}", f"{2**63 - 1} {2**64 + 1}"),
    ({"type": "integer", "minimum": -(2**70), "maximum": 2**70}, f"{2**70} -{2**70} 0 17", f"{2**70 + 1} -{2**70 + 1}"),
    ({"const": {"a": BIG, "b": [BIG, "x"]}}, f'{{"a":{BIG},"b":[{BIG},"x"]}}', f'{{"a":{BIG - 1},"b":[{BIG},"x"]}}'),
    (LIST, "[] [0.2] [0.2,0.1,0,0]", "[0.2,0.3]"),
    ({**LIST, "minItems": 1, "maxItems": 3}, "[0.2] [0.2,0.1,0]", "[] [0,0,0,0]"),
    (PAIR, '[] [0.9] [0.9,"x"]', '[1] [0.9,"x",1]'),
    (BOTH, f'{{"a":0.9,"b":{BIG}}} {{"a":0.9,"b":{BIG},"z":1}}', f'{{"a":1,"b":{BIG}}} {{"a":0.9}}'),
    (OPEN, '{} {"a":0.9} {"b":null} {"a":0.9,"b":null}', '{"a":1} {"b":null,"a":0.9}'),
    ({"type": "object", "additionalProperties": SHARE}, '{} {"x":0.9,"y":0.05}', '{"x":1}'),
    (NAMED, '{"a":0.9,"b":0.1}', '{"a":0.9,"b":1} {"a":1,"b":0.1}'),
    (TREE, '{"v":0.20,"n":{"v":0.1,"n":null}}', '{"v":0,"n":null} {"v":1,"n":{"v":0.0,"n":null}}'),
    ({"oneOf": [{"type": "number", "maximum": 0.25}, {"type": "string"}]}, '0.2 "x"', "0.3"),
    ({"type": "object", "properties": {"a": {"type": "number", "minimum": 0.55, "maximum": 0.25}}}, "{}", '{"a":0.3}'),
]  # fmt: skip


@pytest.mark.parametrize(("schema", "texts", "others"), CASES)
def test_what_a_schema_holds(grammars: Grammars, schema: Any, texts: str, others: str) -> None:
    for each in (schema, json.dumps(schema)):
        assert held(grammars, texts.split(), json=each, disable_any_whitespace=True) == texts.split()
        assert held(grammars, others.split(), json=each, disable_any_whitespace=True) == []
    for text in texts.split():
        if "multipleOf" not in schema:  # of doubles
            jsonschema.validate(json.loads(text), schema)
    # Structural tags, calls and grammars alike.
    tag = {"type": "tag", "begin": "<", "content": {"type": "json_schema", "json_schema": schema}, "end": ">"}
    everywhere = [f"<{each}>" for each in [*texts.split(), *others.split()]]
    allowed = [f"<{each}>" for each in texts.split()]
    assert held(grammars, everywhere, structural_tag={"format": tag}) == allowed
    call = grammar_of([f'start: "<" %json {schema_text(schema)} ">"'])
    assert held(grammars, everywhere, grammar=call) == allowed


def test_white_space_beside_exact_numbers(grammars: Grammars) -> None:
    schema = an_object(a=SHARE, b={"type": "string"}, c={"type": "object"})
    texts = ['{"a":0.9,"b":"x","c":{}}', '{ "a" : 0.9 ,\n  "b": "x", "c": { } }', '{"a":  0.9,"b":"x","c":{}}']
    assert held(grammars, texts, json=schema) == texts[:2]
    assert held(grammars, texts, json=schema, disable_any_whitespace=True) == texts[:1]
    assert held(grammars, texts, json=schema, whitespace_pattern="") == texts[:1]
    assert held(grammars, texts, json=schema, whitespace_pattern=" *") == [texts[0], texts[2]]
    texts = ["[]", "[ ]", "[0.2 , 0.1]", "[0.2,0.1 ]"]
    assert held(grammars, texts, json=LIST) == texts


def test_definitions_that_nothing_refers_to_change_nothing() -> None:
    plain = an_object(a={"type": "string"})
    assert "%lark" not in grammar_text(StructuredOutputsParams(json={**plain, "$defs": {"P": SHARE}}))
    assert "%lark" in grammar_text(StructuredOutputsParams(json=BOTH))


def test_calls_of_exact_numbers_are_closed(grammars: Grammars) -> None:
    schema = bound(CallableFunction("f", {"allOf": [an_object(a=SHARE), an_object(b={"const": BIG})]}))
    texts = [f'{{"a":0.9,"b":{BIG}}}', f'{{"a":0.9,"b":{BIG},"c":1}}', f'{{"a":0.96,"b":{BIG}}}']
    assert held(grammars, texts, json=schema) == texts[:1]


@pytest.mark.parametrize(
    "schema", [{"type": "number", "minimum": 0.5, "maximum": 0.25}, {"type": "string", "const": BIG}]
)
def test_no_value(schema: Any) -> None:
    with pytest.raises(VLLMValidationError, match="Unsatisfiable"):
        grammar_text(StructuredOutputsParams(json=schema))


NAMES = st.sampled_from(["minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"])
BOUNDS = st.one_of(
    st.integers(-30, 30),
    st.integers(-300, 300).map(lambda each: each / 100),
    st.integers(-(10**20), 10**20),
    st.integers(-(10**6), 10**6).map(lambda each: each * 1e-7),
)


@settings(max_examples=300, deadline=None)
@given(
    bounds=st.dictionaries(NAMES, BOUNDS, min_size=1, max_size=2),
    is_integer=st.booleans(),
    near=st.sampled_from(["0", "1", "-1", "0.001", "-0.001", "0.1", "-0.05"]),
    other=BOUNDS,
)
def test_expressions_are_the_bounds(bounds: dict[str, Any], is_integer: bool, near: str, other: Any) -> None:
    exact = {name: Decimal(str(each)) for name, each in bounds.items()}
    expressions = number_expressions(bounds, is_integer)
    for value in [*(each + Decimal(near) for each in exact.values()), Decimal(str(other))]:
        is_held = (
            value >= exact.get("minimum", value)
            and value <= exact.get("maximum", value)
            and not ("exclusiveMinimum" in exact and value <= exact["exclusiveMinimum"])
            and not ("exclusiveMaximum" in exact and value >= exact["exclusiveMaximum"])
        )
        text = format(value, "f")
        for spelled in {text, f"{text}0" if "." in text else text} - {"-0", "-0.0", "-0.00", "-0.000", "-0.0000"}:
            if not is_integer or "." not in spelled:
                found = all(re.fullmatch(each, spelled) is not None for each in expressions)
                assert found == is_held, (spelled, expressions)
                assert not (is_held and is_empty(bounds, is_integer))


ONE_BOUND = st.dictionaries(NAMES, BOUNDS, min_size=1, max_size=1)
SIMPLE = st.sampled_from(
    [{"const": BIG}, {"enum": [BIG, "x"]}, {"type": "boolean"}, {"type": "string", "maxLength": 2}]
)


def _list(each: Any, least: int) -> Any:
    return {"type": "array", "items": each, "minItems": least, "maxItems": 2}


def _fields(fields: dict[str, Any], count: int, more: bool) -> Any:
    return {"type": "object", "properties": fields, "required": list(fields)[:count], "additionalProperties": more}


SCHEMAS = st.recursive(
    st.one_of(ONE_BOUND.map(lambda bounds: {"type": "number", **bounds}), SIMPLE),
    lambda inner: st.one_of(
        st.builds(_list, inner, st.integers(0, 1)),
        st.builds(lambda one, other: {"anyOf": [one, other]}, inner, inner),
        st.builds(
            _fields, st.dictionaries(st.sampled_from("abc"), inner, max_size=3), st.integers(0, 2), st.booleans()
        ),
    ),
    max_leaves=4,
)


@settings(max_examples=100, deadline=None)
@given(schema=SCHEMAS, seed=st.integers(0, 99))
def test_random_answers_are_valid(grammars: Grammars, schema: Any, seed: int) -> None:
    matcher = grammars.start(grammar_text(StructuredOutputsParams(json=schema)))
    answer = random_answer(matcher, random.Random(seed))
    if answer is not None:
        jsonschema.Draft202012Validator(schema).validate(json.loads(answer))
