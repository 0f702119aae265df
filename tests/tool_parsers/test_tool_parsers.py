"""Each format of calls, with texts as its published chat template writes them: whole, and cut at every character."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
from parsed_answers import parse, parse_cut

from vllm.tool_parsers import ToolParserManager

HARD: dict[str, Any] = {
    "city": 'São "Paulo" {x} [y] \\ </tool_call>, 東京 🌧\n2nd line\t</parameter',
    "days": -3,
    "exact": True,
    "place": {"a": {"b": [1, 2.5, None, {"c": "}"}]}, "d": "{\"e\": 'f'}"},
    "tags": ["", "]", "a, b"],
    "note": None,
}
"""Quotes, braces, escapes, characters beyond ASCII, objects in objects."""


def as_json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def hermes(*calls: tuple[str, Any]) -> str:
    return "\n".join(f'<tool_call>\n{{"name": "{n}", "arguments": {as_json(a)}}}\n</tool_call>' for n, a in calls)


def llama3(*calls: tuple[str, Any]) -> str:
    return "; ".join(f'{{"name": "{n}", "parameters": {as_json(a)}}}' for n, a in calls)


def python(*calls: tuple[str, Any]) -> str:
    written = [f"{n}({', '.join(f'{k}={v!r}' for k, v in a.items())})" for n, a in calls]
    return f"[{', '.join(written)}]"


def llama4(*calls: tuple[str, Any]) -> str:
    return f"<|python_start|>{python(*calls)}<|python_end|>"


def array(*calls: tuple[str, Any]) -> str:
    return as_json([{"name": n, "parameters": a} for n, a in calls])


FORMATS: dict[str, tuple[Callable[..., str], bool]] = {
    # name: how it writes calls, and whether text may stand before them
    "hermes": (hermes, True),
    "llama3_json": (llama3, False),
    "pythonic": (python, False),
    "llama4_pythonic": (llama4, True),
    "json_array": (array, False),
}
EACH = pytest.mark.parametrize("name", FORMATS)
# A format whose texts end at a marker cannot hold it.
UNQUOTED = {"</tool_call>", "</parameter"}


def hard_arguments(name: str) -> dict[str, Any]:
    return HARD


@EACH
def test_one_call(name):
    write, _ = FORMATS[name]
    text = write(("weather", {"city": "Paris", "days": 2}))
    assert parse(text, name) == (None, None, [("weather", {"city": "Paris", "days": 2})])
    parse_cut(text, name)


@EACH
def test_arguments_with_quotes_braces_escapes_and_other_alphabets(name):
    write, _ = FORMATS[name]
    arguments = hard_arguments(name)
    assert parse(write(("weather", arguments)), name)[2] == [("weather", arguments)]


@EACH
def test_no_arguments_and_two_calls(name):
    write, _ = FORMATS[name]
    text = write(("now", {}), ("weather", {"city": "Oslo"}))
    assert parse(text, name) == (None, None, [("now", {}), ("weather", {"city": "Oslo"})])
    parse_cut(text, name)


@EACH
def test_text_before_and_after(name):
    write, has_text = FORMATS[name]
    if not has_text:
        pytest.skip("calls are the whole answer")
    text = f"I will look.\n\n{write(('now', {}))}\nThat is it."
    _, content, calls = parse(text, name)
    assert calls == [("now", {})]
    assert content == "I will look.\nThat is it."


@EACH
@pytest.mark.parametrize(
    "text",
    [
        "Hello.",
        " 3 < 4 > 2 \n",
        "{",
        "[",
        "[1, 2]",
        '{"answer": {"name": 1}}',
        "<",
        "",
        "\n",
        '"name"',
        "[x for x in y]",
    ],
)
def test_other_texts_are_content(name, text):
    assert parse(text, name) == (None, text or None, [])


@EACH
def test_a_marker_that_begins_no_call_is_content(name):
    parser = ToolParserManager.get_tool_parser(name)
    for marker in parser.begins:
        text = f"It writes {marker} and then nothing. {marker}"
        assert parse(text, name) == (None, text, [])


@EACH
def test_a_call_that_never_ends_keeps_what_came(name):
    write, _ = FORMATS[name]
    text = write(("weather", {"city": "Par"}))
    cut = text[: text.index("Par") + 3]
    _, content, calls = parse(cut, name)
    if calls:
        ((called, arguments),) = calls
        assert called == "weather" and isinstance(arguments, str) and arguments.endswith("Par")
    else:
        assert content == cut


def test_other_ways_to_write_json():
    for text, expected in (
        ('{"arguments": {"a": 1}, "name": "f"}', {"a": 1}),
        ('{"name": "f", "parameters": {}}', {}),
        ('{"name": "f"}', {}),
        ('{"name": "f", "arguments": null}', {}),
        ('{"name": "f", "arguments": "{\\"a\\": 1}"}', {"a": 1}),
        ('{"name": "f", "arguments": ""}', {}),
        ('{"id": 1, "type": "function", "function": {"name": "f", "arguments": {"a": 1}}}', {"a": 1}),
        ('[{"name" : "f" , "arguments" : { "a" : 1 } } ]', {"a": 1}),
    ):
        assert parse(f"<tool_call>{text}</tool_call>", "hermes") == (None, None, [("f", expected)])


def test_after_a_broken_call_the_next_one_counts():
    text = '<tool_call>{"nam</tool_call> <tool_call>{"name": "now", "arguments": {}}</tool_call>'
    _, content, calls = parse(text, "hermes")
    assert (content, calls) == ('<tool_call>{"nam</tool_call>', [("now", {})])


def test_names_of_parsers():
    names = ToolParserManager.list_registered()
    assert set(FORMATS) <= set(names)
    with pytest.raises(KeyError, match=r"tool parser 'none' is not known; there are .*hermes"):
        ToolParserManager.get_tool_parser("none")
