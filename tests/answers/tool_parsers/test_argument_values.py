"""Values of arguments: texts stay texts wherever a schema says so, nothing is lost around them or within names, and
what JSON or Python does not hold stands as it is written."""

from __future__ import annotations

import json
from typing import Any

import pytest
from call_texts import FORMATS

from vllm.answers.events import collect
from vllm.answers.reader import Machine
from vllm.answers.syntax.schemas import ArgumentSchema
from vllm.tool_parsers import ToolParserManager

TAGGED = (
    "qwen3_coder", "seed_oss", "glm45", "minimax_m2", "minimax_m3", "dots", "step3", "minicpm5", "hy_v3", "k2_horizon",
    "muse",
)  # fmt: skip
PYTHONIC = ("pythonic", "llama4_pythonic", "lfm2", "olmo3")
SPACED = (" a ", "\na\n", "\n", "", "  ", "a\n\n", "\ta\t", "\n\n a\r\n")


def arguments_of(name: str, text: str, schema: Any = None, function: str = "f") -> dict[str, str]:
    """By function, the JSON of each call's arguments, the same whole and character by character."""
    tools = [{"type": "function", "function": {"name": function, "parameters": schema or {}}}]
    found = []
    for size in (len(text), 1):
        machine = Machine(ToolParserManager.get_tool_parser(name)(None, tools).read)
        events = [each for start in range(0, len(text), size) for each in machine.feed(text[start : start + size])]
        found.append({each.name: each.arguments for each in collect([*events, *machine.finish()]).calls})
    assert found[0] == found[1]
    return found[0]


def values_of(name: str, text: str, schema: Any = None) -> Any:
    return json.loads(arguments_of(name, text, schema)["f"])


@pytest.mark.parametrize("name", FORMATS)
def test_white_space_of_a_text_is_the_texts(name):
    schema = {"properties": {"a": {"type": "string"}, "b": {"type": "string"}}}
    for text in SPACED:
        assert values_of(name, FORMATS[name][0](("f", {"a": text, "b": text})), schema) == {"a": text, "b": text}


DEFINITIONS = {
    "$defs": {
        "digit": {"enum": ["1", "2"]},
        "again": {"$ref": "#/$defs/digit", "title": "Again"},
        "tree": {"anyOf": [{"type": "string"}, {"$ref": "#/$defs/tree"}]},
        "a/b~c": {"type": "string"},
    },
    "definitions": {"zip": {"type": "string", "pattern": "[0-9]+"}},
}
TEXTS = {
    "a reference beside a remark": {"$ref": "#/$defs/digit", "description": "x"},
    "a chain": {"$ref": "#/$defs/again"},
    "definitions": {"allOf": [{"$ref": "#/definitions/zip"}], "default": "1"},
    "allOf": {"allOf": [{"$ref": "#/$defs/digit"}]},
    "allOf of several": {"allOf": [{"description": "x"}, {"$ref": "#/$defs/again"}, {"minLength": 1}]},
    "anyOf with null": {"anyOf": [{"$ref": "#/$defs/digit"}, {"type": "null"}], "default": None},
    "oneOf with null": {"oneOf": [{"type": "null"}, {"allOf": [{"$ref": "#/$defs/digit"}]}]},
    "a list of types": {"type": ["string", "null"]},
    "nullable": {"$ref": "#/$defs/digit", "nullable": True},
    "const": {"const": "1"},
    "consts": {"oneOf": [{"const": "1", "title": "One"}, {"const": "2"}]},
    "an enum with null": {"enum": ["1", "2", None]},
    "an enum of numbers, too": {"enum": ["1", 7]},
    "itself": {"$ref": "#/$defs/tree"},
    "escapes": {"$ref": "#/$defs/a~1b~0c"},
    "a property": {"$ref": "#/properties/other"},
}


@pytest.mark.parametrize("name", TAGGED)
def test_texts_that_look_like_numbers(name):
    for case, own in TEXTS.items():
        schema = {"type": "object", "properties": {"a": own, "other": {"type": "string"}}, **DEFINITIONS}
        assert values_of(name, FORMATS[name][0](("f", {"a": "1"})), schema) == {"a": "1"}, case


NUMBERS: dict[str, Any] = {
    "a reference": {"$ref": "#/$defs/n", "description": "x"},
    "anyOf": {"anyOf": [{"$ref": "#/$defs/n"}, {"type": "null"}]},
    "allOf": {"allOf": [{"type": ["integer", "string"]}, {"$ref": "#/$defs/n"}]},
    "nothing": {},
    "an enum": {"enum": [1, "2"]},
    "text or number": {"type": ["string", "integer"]},
    "itself": {"$ref": "#/$defs/loop"},
    "no such reference": {"$ref": "#/$defs/none"},
}


@pytest.mark.parametrize("name", TAGGED)
def test_numbers_are_numbers(name):
    for case, own in NUMBERS.items():
        definitions = {"n": {"type": "integer"}, "loop": {"$ref": "#/$defs/loop"}}
        schema = {"type": "object", "properties": {"a": own}, "$defs": definitions}
        assert values_of(name, FORMATS[name][0](("f", {"a": 1})), schema) == {"a": 1}, case


def test_arguments_that_parts_of_a_schema_describe():
    text = {"type": "string"}
    for schema in (
        {"allOf": [{"properties": {"b": text}}, {"properties": {"a": text}}]},
        {"$ref": "#/$defs/all", "$defs": {"all": {"properties": {"a": text}}}},
        {"anyOf": [{"properties": {"a": text}}, {"properties": {"a": {"const": "1"}}}]},
        {"additionalProperties": text},
        {"patternProperties": {"^a": text}, "additionalProperties": False},
    ):
        assert values_of("qwen3_coder", FORMATS["qwen3_coder"][0](("f", {"a": "1"})), schema) == {"a": "1"}, schema


def test_elements_in_elements_are_of_their_schema():
    node = {
        "type": "object",
        "properties": {
            "id": {"$ref": "#/$defs/digits"},
            "more": {"anyOf": [{"type": "array", "items": {"$ref": "#/$defs/node"}}, {"type": "null"}]},
        },
    }
    schema = {
        "properties": {"top": {"allOf": [{"$ref": "#/$defs/node"}]}},
        "$defs": {"node": node, "digits": {"type": "string"}},
    }
    value = {"top": {"id": "1", "more": [{"id": "2", "more": [{"id": "3"}]}]}}
    assert values_of("minimax_m3", FORMATS["minimax_m3"][0](("f", value)), schema) == value


def test_schemas_of_any_size_are_read():
    wide = {f"d{level}": {"allOf": [{"$ref": f"#/$defs/d{level + 1}"}] * 2} for level in range(60)}
    schema = {"$ref": "#/$defs/d0", "$defs": {**wide, "d60": {"properties": {"a": {"type": "string"}}}}}
    assert ArgumentSchema(schema).property("a").is_text
    deep: Any = {"type": "string"}
    for _ in range(100_000):
        deep = {"allOf": [deep]}
    assert ArgumentSchema(deep).allowed.types is None and not ArgumentSchema(deep).property_names


NAMES = {"max-len": "3", "a.b": 'x, max-len="4"', "$ref": True, "@type": None, "2nd": [1.05, -0.5], "größe": {"c-d": 1}}


@pytest.mark.parametrize("name", PYTHONIC)
def test_names_that_are_none_of_pythons(name):
    write, _ = FORMATS[name]
    assert json.loads(arguments_of(name, write(("get-the.weather", NAMES)))["get-the.weather"]) == NAMES
    for key in NAMES:
        for value in ("3", 3):
            assert values_of(name, write(("f", {"q": "x", key: value}))) == {"q": "x", key: value}
    known = {"max len": 1, "a(b)": "x", "c,d": "y", "e=": 2}
    assert values_of(name, write(("f", known)), {"properties": {each: {} for each in known}}) == known
    stars = write(("f", {"q": "x", "KEY": 3})).replace("KEY=3", '**{"max len": 3, "b": [True]}')
    assert values_of(name, stars) == {"q": "x", "max len": 3, "b": [True]}


LONG = "9" * 4400
HUGE = {
    LONG: LONG,
    f"-{LONG}": f"-{LONG}",
    f"[1, {LONG}]": f"[1, {LONG}]",
    "1e999": "1e999",
    "-1e999": "-1e999",
    "NaN": '"NaN"',
    "-Infinity": '"-Infinity"',
    f"0x{'f' * 5000}": f'"0x{"f" * 5000}"',
    "[" * 5000 + "]" * 5000: f'"{"[" * 5000 + "]" * 5000}"',
    "1.05": "1.05",
    f"0{LONG}": None,
}


@pytest.mark.parametrize("name", [*PYTHONIC, "qwen3_coder", "minimax_m3", "gemma4", "k2_horizon", "glm45"])
def test_numbers_that_python_does_not_hold(name):
    for written, expected in HUGE.items():
        text = FORMATS[name][0](("f", {"a": 1})).replace("a=1", f"a={written}").replace("a:1", f"a:{written}")
        text = text.replace(">1<", f">{written}<").replace("\n1\n", f"\n{written}\n").replace(">1]", f">{written}]")
        if name in ("gemma4", "minimax_m3") and written.startswith("["):
            # Their lists are read by parts: one that is too deep is no call, or a text.
            assert arguments_of(name, text).keys() <= {"f"}
            continue
        for schema in ({}, {"properties": {"a": {"type": "number"}}}):
            found = arguments_of(name, text, schema)["f"]
            json.loads(found, parse_int=str, parse_constant=pytest.fail)
            assert expected is None or found == f'{{"a": {expected}}}', (written[:20], found[:60])


@pytest.mark.parametrize("name", [*PYTHONIC, "qwen3_coder", "hermes", "llama3_json", "gemma4"])
def test_halves_of_characters_can_be_sent(name):
    for half in ("\\ud800", "\\udc00x"):
        for written in (f'"{half}"', f'["{half}"]'):
            text = FORMATS[name][0](("f", {"a": 1})).replace("a=1", f"a={written}").replace("a:1", f"a:{written}")
            text = text.replace('"a": 1', f'"a": {written}').replace(">\n1\n<", f">\n{written}\n<")
            arguments_of(name, text)["f"].encode()
    calls = arguments_of(
        "hermes", '<tool_call>{"name": "f\\ud800", "arguments": "{\\"a\\": \\"\\ud800\\"}"}</tool_call>'
    )
    assert json.dumps(calls, ensure_ascii=False).encode()
