"""Each format of calls, with texts as its published chat template writes them: whole, and cut at every character."""

from __future__ import annotations

import random
import re

import pytest
from call_texts import FORMATS, HARD, mistral_older
from parsed_answers import parse, parse_by_characters, parse_cut

from vllm.tool_parsers import ToolParserManager

EACH = pytest.mark.parametrize("name", FORMATS)


@EACH
def test_one_call(name):
    write, _ = FORMATS[name]
    text = write(("weather", {"city": "Paris", "days": 2}))
    assert parse(text, name) == (None, None, [("weather", {"city": "Paris", "days": 2})])
    parse_cut(text, name)


@EACH
def test_arguments_with_quotes_braces_escapes_and_other_alphabets(name):
    write, _ = FORMATS[name]
    arguments = HARD
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
    if name in ("openai", "muse", "inkling"):
        pytest.skip("its markers are not for texts")
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


def test_older_mistral_and_ids_in_texts():
    text = mistral_older(("weather", HARD), ("now", {}))
    assert parse(text, "mistral") == (None, None, [("weather", HARD), ("now", {})])
    assert parse('[TOOL_CALLS]now[CALL_ID]abc123def[ARGS]{}[TOOL_CALLS]now{"a": 1}', "mistral")[2] == [
        ("now", {}),
        ("now", {"a": 1}),
    ]


def test_channels():
    text = (
        "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>commentary<|message|>I look.<|end|>"
        "<|start|>assistant to=functions.now<|channel|>commentary json<|message|>{}<|call|>"
    )
    assert parse(text, "openai") == ("Hm.", "I look.", [("now", {})])
    answer = "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>final<|message|>Yes.<|return|>"
    assert parse(answer, None, "openai_gptoss") == ("Hm.", "Yes.", [])


def test_after_a_broken_call_the_next_one_counts():
    text = '<tool_call>{"nam</tool_call> <tool_call>{"name": "now", "arguments": {}}</tool_call>'
    _, content, calls = parse(text, "hermes")
    assert (content, calls) == ('<tool_call>{"nam</tool_call>', [("now", {})])


def test_a_broken_call_does_not_take_the_next_one():
    begin, arguments, end = "<|tool_call_begin|>", "<|tool_call_argument_begin|>", "<|tool_call_end|>"
    text = f'{begin}functions.f:0{arguments}{{"a": "b"{end}{begin}functions.g:1{arguments}{{}}{end}'
    _, _, calls = parse(f"<|tool_calls_section_begin|>{text}<|tool_calls_section_end|>", "kimi_k2")
    assert calls == [("f", '{"a": "b"'), ("g", {})]


@pytest.mark.parametrize(
    ("written", "arguments"),
    [
        ("tags={'a', 'b'}", {"tags": ["a", "b"]}),
        ("month=07, day=-05", {"month": 7, "day": -5}),
        ("at='07'", {"at": "07"}),
        ("run='sed -n '3,4p' f'", {"run": "sed -n '3,4p' f"}),
        ("run='print('a')', n=1", {"run": "print('a')", "n": 1}),
        ('run="say "a, b" twice"', {"run": 'say "a, b" twice'}),
        ("a=['it's', 'x'], b={'k': 'v'}", {"a": ["it's", "x"], "b": {"k": "v"}}),
        ("run='a\0b'", {"run": "a\0b"}),
        (r"run='\ud83d\ude00'", {"run": "\U0001f600"}),
        ("a='x' , b='y',", {"a": "x", "b": "y"}),
    ],
)
def test_python_that_is_none(written, arguments):
    assert parse(f"[f({written})]", "pythonic") == (None, None, [("f", arguments)])
    assert parse(f"[f({written}), g()]", "pythonic")[2] == [("f", arguments), ("g", {})]


def test_calls_of_llama_in_a_text():
    call = '{"name": "now", "parameters": {}}'
    assert parse(f"Look: {call} Yes.", "llama3_json") == (None, "Look: Yes.", [("now", {})])
    for text in ('Look: {"name": "Ann"} Yes.', '{"name": "Ann"}', 'a {"name"'):
        assert parse(text, "llama3_json") == (None, text, [])


@EACH
def test_damaged_texts(name):
    """Whole and by characters they are the same, and nothing is raised."""
    write, _ = FORMATS[name]
    rng = random.Random(name)
    pieces = re.findall(r"<[^<>]*>|\w+|\s+|.", write(("weather", {"city": 'x"\n</p', "days": [1]}), ("now", {})))
    for _ in range(15):
        text = list(pieces)
        for _ in range(rng.randint(1, 4)):
            if not text:
                break
            place = rng.randrange(len(text))
            more = rng.choice(
                [[], [], [rng.choice(pieces)], [rng.choice(["hello ", "{", "}", "[", ")", '"', "\\", "<"])]]
            )
            text[place : place + rng.randint(0, 1)] = more
            del text[rng.choice([len(text), len(text), rng.randrange(len(text) + 1)]) + 1 :]
        parse_by_characters("".join(text), name)


def test_names_of_parsers():
    names = ToolParserManager.list_registered()
    assert set(FORMATS) <= set(names)
    with pytest.raises(KeyError, match=r"tool parser 'none' is not known; there are .*hermes"):
        ToolParserManager.get_tool_parser("none")
