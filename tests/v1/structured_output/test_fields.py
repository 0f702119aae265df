"""Which values a schema leaves to a place of an answer, and where the place is."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from byte_tokenizer import EOS, VOCAB_SIZE, make_byte_tokenizer

from vllm.params.structured import StructuredOutputsParams
from vllm.v1.structured_output.fields import finite_fields
from vllm.v1.structured_output.finite_values import Schema, json_text, longest_enum

LEAF = {"enum": ["p", "q", 3]}
ROOT = {"$defs": {"leaf": LEAF, "a/b~c": {"const": 7}, "loop": {"$ref": "#/$defs/loop"}}}


@pytest.mark.parametrize(
    ("schema", "values"),
    [
        ({"enum": ["x", "x", 1, 1.0, None]}, ["x", 1, None]),
        ({"const": "x"}, ["x"]),
        ({"type": "boolean"}, [True, False]),
        ({"type": ["null", "boolean"]}, [None, True, False]),
        ({"type": "string"}, None),
        ({"type": ["null", "string"]}, None),
        ({"type": "string", "enum": ["x", 1, None]}, ["x"]),
        ({"type": "integer", "enum": [1, 2.0, 2.5, True]}, [1, 2.0]),
        ({"enum": ["x", "y", "z"], "allOf": [{"enum": ["z", "y"]}]}, ["y", "z"]),
        ({"anyOf": [{"const": "x"}, {"type": "null"}, {"const": "x"}]}, ["x", None]),
        ({"anyOf": [{"const": "x"}, {"type": "string"}]}, None),
        ({"oneOf": [{"const": 1}, {"$ref": "#/$defs/leaf"}]}, [1, "p", "q", 3]),
        ({"$ref": "#/$defs/leaf", "description": "it"}, ["p", "q", 3]),
        ({"$ref": "#/$defs/a~1b~0c"}, [7]),
        ({"$ref": "#/$defs/loop"}, None),
        ({"$ref": "#/$defs/missing"}, None),
        ({"$ref": "https://example.org/leaf"}, None),
        ({"enum": [[1], "x"]}, None),
        ({"const": {"a": 1}}, None),
        (True, None),
        ({}, None),
    ],
)
def test_values(schema: Any, values: list[Any] | None) -> None:
    found = Schema(schema, ROOT).values()
    assert found == values and list(map(type, found or ())) == list(map(type, values or ()))


def chosen(schema: Any, answer: str) -> dict[str, tuple[list[Any], Any]]:
    fields = finite_fields(schema, answer.encode())
    for each in fields:
        if each.chosen is not None:
            assert answer.encode()[each.start :].startswith(json_text(each.values[each.chosen]).encode())
    return {each.path: (each.values, None if each.chosen is None else each.values[each.chosen]) for each in fields}


NESTED = {
    "properties": {
        "é b": {"const": "日"},
        "list": {"prefixItems": [{"type": "boolean"}], "items": {"anyOf": [LEAF, {"properties": {"k": LEAF}}]}},
        "maybe": {"anyOf": [{"type": "null"}, {"type": "object", "properties": {"k": LEAF}}]},
        "text": {"type": "string"},
    },
    "additionalProperties": {"type": "boolean"},
}


def test_nested_places() -> None:
    answer = '\n{"text": "a\\"{,:", "é b": "日", "list" : [true ,"p",{"k":"q"} ], "maybe":{"k": 3}, "more":false}'
    leaf = LEAF["enum"]
    assert chosen(NESTED, answer) == {
        '$["é b"]': (["日"], "日"),
        "$.list[0]": ([True, False], True),
        "$.list[2].k": (leaf, "q"),
        "$.maybe.k": (leaf, 3),
        "$.more": ([True, False], False),
    }
    assert chosen({"$ref": "#/$defs/leaf", **ROOT}, '"q"') == {"$": (leaf, "q")}
    assert chosen({"const": 12}, "12") == {"$": ([12], 12)}


def test_every_beginning_of_an_answer_has_its_fields_so_far() -> None:
    answer = '{"é b": "日", "list": [true, "p"], "maybe": {"k": 3}, "more": false}'
    whole = finite_fields(NESTED, answer.encode())
    for size in range(len(answer.encode()) + 1):
        part = finite_fields(NESTED, answer.encode()[:size])
        assert [(each.path, each.start) for each in part] == [
            (each.path, each.start) for each in whole if each.start < size
        ]
        for one, other in zip(part, whole, strict=False):
            text = json_text(other.values[other.chosen]).encode()
            is_whole = one.start + len(text) <= size
            is_known = is_whole and (text[-1:] == b'"' or one.start + len(text) < size)
            assert one.chosen == (other.chosen if is_known else None)


def test_alternatives_are_those_that_the_text_before_leaves() -> None:
    cat = {"properties": {"kind": {"const": "cat"}, "sound": {"enum": ["meow", "purr"]}}}
    dog = {"properties": {"kind": {"const": "dog"}, "sound": {"enum": ["woof", "purr"]}}}
    either = {"oneOf": [cat, dog], "properties": {"tame": {"type": "boolean"}}}
    assert chosen(either, '{"kind": "dog", "sound": "purr", "tame": true}') == {
        "$.kind": (["cat", "dog"], "dog"),
        "$.sound": (["woof", "purr"], "purr"),
        "$.tame": ([True, False], True),
    }
    assert chosen(either, '{"sound": "meow", "kind": "cat"}') == {
        "$.sound": (["meow", "purr", "woof"], "meow"),
        "$.kind": (["cat"], "cat"),
    }


@pytest.mark.parametrize("text", ["", " ", "nul", "[[", '{"a"', '{"a":', '{"a" 1}', "}", "\\", "[" * 5000, '{"a":1,}x'])
def test_other_texts_have_none(text: str) -> None:
    assert finite_fields({"properties": {"a": {"type": "string"}}}, text.encode()) == []


def test_the_longest_enum() -> None:
    assert longest_enum({"a": [{"enum": [1]}, {"b": {"enum": [1, 2, 3]}}], "enum": [1, 2]}) == 3
    assert longest_enum(True) == 0


NUMBERS = [1, 1.0, -0.0, 1.5, -3.25, 1e30, 1e-7, 10**20, 123456789.125, 0.1]
TEXTS = ["", "a/b", 'q"', "b\\", "\t\n\r\b\f", "\x00\x01\x1f\x7f", "\u2028é日😀", "</s>", "<", "'"]


@pytest.mark.parametrize("value", [*NUMBERS, *TEXTS, True, False, None], ids=ascii)
def test_a_grammar_allows_the_text_of_a_value(tmp_path: Path, value: Any) -> None:
    pytest.importorskip("llguidance")
    from vllm.v1.structured_output.grammar import grammar_text
    from vllm.v1.structured_output.matcher import Grammars

    grammars = Grammars(make_byte_tokenizer(tmp_path).backend.to_str(), VOCAB_SIZE, [EOS])
    read = json.loads(json_text(value))
    assert (float(read) if isinstance(value, float) else read) == value
    matcher = grammars.start(grammar_text(StructuredOutputsParams(json={"const": value})))
    assert matcher.take([*grammars.spell(json_text(value)), EOS]) is None
    assert EOS not in grammars.spell(json_text(value))
