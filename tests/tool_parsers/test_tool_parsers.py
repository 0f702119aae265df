"""Each format of calls, with texts as its published chat template writes them: whole, and cut at every character."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable
from typing import Any

import pytest
from parsed_answers import parse, parse_by_characters, parse_cut

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


def in_python(*calls: tuple[str, Any]) -> str:
    return f"<|tool_call_start|>{python(*calls)}<|tool_call_end|>"


def by_lines(*calls: tuple[str, Any]) -> str:
    return "\n".join(["<function_calls>", *(python(call)[1:-1] for call in calls), "</function_calls>"])


def mistral(*calls: tuple[str, Any]) -> str:
    return "".join(f"[TOOL_CALLS]{n}[ARGS]{as_json(a)}" for n, a in calls)


def mistral_older(*calls: tuple[str, Any]) -> str:
    return "[TOOL_CALLS] " + as_json([{"name": n, "arguments": a, "id": "abcdefghi"} for n, a in calls])


def granite(*calls: tuple[str, Any]) -> str:
    return "<|tool_call|>" + as_json([{"name": n, "arguments": a} for n, a in calls])


def phi4(*calls: tuple[str, Any]) -> str:
    return "functools" + as_json([{"name": n, "arguments": a} for n, a in calls])


def jamba(*calls: tuple[str, Any]) -> str:
    return f"<tool_calls>{as_json([{'name': n, 'arguments': a} for n, a in calls])}</tool_calls>"


def deepseek_v3(*calls: tuple[str, Any]) -> str:
    written = [
        f"<｜tool▁call▁begin｜>function<｜tool▁sep｜>{n}\n```json\n{as_json(a)}\n```<｜tool▁call▁end｜>"
        for n, a in calls
    ]
    return "<｜tool▁calls▁begin｜>" + "\n".join(written) + "<｜tool▁calls▁end｜>"


def deepseek_v31(*calls: tuple[str, Any]) -> str:
    written = [f"<｜tool▁call▁begin｜>{n}<｜tool▁sep｜>{as_json(a)}<｜tool▁call▁end｜>" for n, a in calls]
    return "<｜tool▁calls▁begin｜>" + "".join(written) + "<｜tool▁calls▁end｜>"


def plain(value: Any) -> str:
    return value if isinstance(value, str) else as_json(value)


def deepseek_v32(*calls: tuple[str, Any]) -> str:
    mark = "｜DSML｜"
    text = f"<{mark}function_calls>\n"
    for n, a in calls:
        text += f'<{mark}invoke name="{n}">\n'
        for k, v in a.items():
            is_text = str(isinstance(v, str)).lower()
            text += f'<{mark}parameter name="{k}" string="{is_text}">{plain(v)}</{mark}parameter>\n'
        text += f"</{mark}invoke>\n"
    return f"{text}</{mark}function_calls>"


def kimi(*calls: tuple[str, Any]) -> str:
    written = [
        f"<|tool_call_begin|>functions.{n}:{i}<|tool_call_argument_begin|>{as_json(a)}<|tool_call_end|>"
        for i, (n, a) in enumerate(calls)
    ]
    return "<|tool_calls_section_begin|>" + "".join(written) + "<|tool_calls_section_end|>"


def qwen3(*calls: tuple[str, Any]) -> str:
    def value(v: Any) -> str:
        return as_json(v) if isinstance(v, (dict, list)) else str(v)

    def arguments(a: dict[str, Any]) -> str:
        return "".join(f"<parameter={k}>\n{value(v)}\n</parameter>\n" for k, v in a.items())

    return "\n".join(f"<tool_call>\n<function={n}>\n{arguments(a)}</function>\n</tool_call>" for n, a in calls)


def glm45(*calls: tuple[str, Any], line: str = "\n") -> str:
    def arguments(a: dict[str, Any]) -> str:
        return "".join(f"<arg_key>{k}</arg_key>{line}<arg_value>{plain(v)}</arg_value>{line}" for k, v in a.items())

    return "\n".join(f"<tool_call>{n}{line}{arguments(a)}</tool_call>" for n, a in calls)


def glm47(*calls: tuple[str, Any]) -> str:
    return glm45(*calls, line="")


def minimax(*calls: tuple[str, Any]) -> str:
    text = "<minimax:tool_call>\n"
    for n, a in calls:
        arguments = "".join(f'<parameter name="{k}">{plain(v)}</parameter>\n' for k, v in a.items())
        text += f'<invoke name="{n}">\n{arguments}</invoke>\n'
    return text + "</minimax:tool_call>"


def gemma_value(value: Any, quote: str) -> str:
    if isinstance(value, str):
        return f"{quote}{value}{quote}"
    if isinstance(value, dict):
        return "{" + ",".join(f"{k}:{gemma_value(v, quote)}" for k, v in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ",".join(gemma_value(v, quote) for v in value) + "]"
    return as_json(value)


def gemma4(*calls: tuple[str, Any]) -> str:
    return "".join(f"<|tool_call>call:{n}{gemma_value(a, '<|' + chr(34) + '|>')}<tool_call|>" for n, a in calls)


def functiongemma(*calls: tuple[str, Any]) -> str:
    written = [f"call:{n}{gemma_value(a, '<escape>')}" for n, a in calls]
    return "".join(f"<start_function_call>{each}<end_function_call>" for each in written)


def harmony(*calls: tuple[str, Any]) -> str:
    written = [f"commentary to=functions.{n} <|constrain|>json<|message|>{as_json(a)}<|call|>" for n, a in calls]
    return "<|start|>assistant".join(f"<|channel|>{each}" for each in written)


FORMATS: dict[str, tuple[Callable[..., str], bool]] = {
    # name: how it writes calls, and whether text may stand before them
    "hermes": (hermes, True),
    "llama3_json": (llama3, False),
    "pythonic": (python, False),
    "llama4_pythonic": (llama4, True),
    "json_array": (array, False),
    "lfm2": (in_python, True),
    "olmo3": (by_lines, True),
    "mistral": (mistral, True),
    "granite": (granite, True),
    "phi4_mini_json": (phi4, True),
    "jamba": (jamba, True),
    "deepseek_v3": (deepseek_v3, True),
    "deepseek_v31": (deepseek_v31, True),
    "deepseek_v32": (deepseek_v32, True),
    "kimi_k2": (kimi, True),
    "qwen3_coder": (qwen3, True),
    "qwen3_xml": (qwen3, True),
    "glm45": (glm45, True),
    "glm47": (glm47, True),
    "minimax_m2": (minimax, True),
    "gemma4": (gemma4, True),
    "functiongemma": (functiongemma, True),
    "openai": (harmony, False),
}
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
    if name == "openai":
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
