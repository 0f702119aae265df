"""Each format of calls, with texts as its published chat template writes them: whole, and cut at every character."""

from __future__ import annotations

import random
import re

import pytest
from call_texts import FORMATS, HARD, mistral_older
from parsed_answers import parse, parse_by_characters, parse_cut

from vllm.tool_parsers import ToolParserManager

EACH = pytest.mark.parametrize("name", FORMATS)
# Formats that are known by other parts of templates than those that write calls.
KNOWN_ELSEWHERE = {
    "llama3_json", "pythonic", "json_array", "lfm2", "granite", "phi4_mini_json", "openai", "gigachat3", "xlam",
    "ernie45",
}  # fmt: skip


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


@pytest.mark.parametrize("name", [name for name in FORMATS if name not in KNOWN_ELSEWHERE])
def test_what_a_template_writes_chooses_the_parser(name):
    text = FORMATS[name][0](("weather", {"city": "Paris"}))
    assert ToolParserManager.of_template(f"{{% for call in calls %}}{text}") is ToolParserManager.get_tool_parser(name)


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


@pytest.mark.parametrize("name", ["qwen3_coder", "glm45", "minimax_m2", "deepseek_v32", "minicpm5", "kimi_k3"])
@pytest.mark.parametrize("written", ['{"city": "Oslo", "days": 1}', "{'city': 'Oslo', 'days': 1}"])
def test_one_argument_that_is_all_of_them(name, written):
    write, _ = FORMATS[name]
    text = write(("weather", {"arguments": written}))
    assert parse(text, name)[2] == [("weather", {"city": "Oslo", "days": 1})]
    parse_cut(text, name)
    both = parse(write(("weather", {"arguments": "{}", "city": "Oslo"})), name)[2]
    assert both == [("weather", {"arguments": {}, "city": "Oslo"})]


@pytest.mark.parametrize("name", ["qwen3_coder", "seed_oss"])
def test_an_argument_without_its_end(name):
    write, _ = FORMATS[name]
    for first, second in (("city", "days"), ("days", "city")):
        values = {"city": "Oslo", "days": 2}
        text = write(("weather", {first: values[first], second: values[second]}))
        text = re.sub(r"\n?</parameter>\n", "\n", text, count=1)
        assert parse(text, name)[2] == [("weather", values)]


def test_tags_with_a_suffix():
    text = re.sub(r"(</?\w+)>", r"\1:x>", FORMATS["hy_v3"][0](("now", {}), ("weather", HARD | {"city": "a<b>"})))
    assert parse(f"So:{text}", "hy_v3") == (None, "So:", [("now", {}), ("weather", HARD | {"city": "a<b:x>"})])
    assert parse("<tool_calls:> and <tool_calls: x>", "hy_v3")[1] == "<tool_calls:> and <tool_calls: x>"


def test_arguments_with_types():
    tags = "<ifm|arg_key>{}</ifm|arg_key><ifm|arg_type>{}</ifm|arg_type><ifm|arg_value>{}</ifm|arg_value>"
    written = (
        tags.format("days", "integer", "2") + tags.format("more", "string", "2") + tags.format("x", "integer", "3")
    )
    text = f"<ifm|tool_calls><ifm|tool_call>weather{written}</ifm|tool_call></ifm|tool_calls>"
    assert parse(text, "k2_horizon")[2] == [("weather", {"days": 2, "more": "2", "x": 3})]
    as_json = '<ifm|tool_call>{"name": "now", "arguments": {}}</ifm|tool_call>'
    assert parse(f"<ifm|tool_calls>{as_json}</ifm|tool_calls>", "k2_horizon")[2] == [("now", {})]


def test_sections_that_are_not_there():
    invoke = '<｜DSML｜invoke name="now">\n</｜DSML｜invoke>'
    for name in ("deepseek_v32", "deepseek_v4"):
        assert parse(f"So: {invoke} Yes.", name) == (None, "So: Yes.", [("now", {})])
    assert parse("function call<|role_sep|>\n" + '{"name": "now", "arguments": {}}', "gigachat3")[2] == [("now", {})]
    assert parse("<|tool_call>:now{}<tool_call|>", "gemma4")[2] == [("now", {})]


def test_messages_without_their_end():
    call = '<atem:function_calls>\n<atem:invoke name="now.now">\n</atem:invoke>\n</atem:function_calls>'
    text = f" to=self<|message|>Hm, to=x or so. to=now<|message|>{call}<|eom|>"
    answer = "<|start|>assistant to=user<|message|>It is to=noon. to=developer<|message|>Note.<|eot|>"
    assert parse(text + answer, "muse") == ("Hm, to=x or so. ", "It is to=noon. ", [("now", {})])


def test_entities_in_names():
    text = FORMATS["kimi_k3"][0](("a&amp;b", {"c&quot;d": "e&amp;f"}))
    assert parse(text, "kimi_k3")[2] == [("a&b", {'c"d': "e&amp;f"})]


def test_elements_in_elements():
    write, mark = FORMATS["minimax_m3"][0], "]<]minimax[>["
    text = write(("weather", {"tags": [], "place": {}, "note": None, "more": {"at": ["x"]}}))
    assert parse(text, "minimax_m3")[2] == [("weather", {"tags": [], "place": {}, "note": None, "more": {"at": ["x"]}})]
    several = f"{mark}<k>a{mark}</k>{mark}<k>b{mark}</k>"
    text = f'{mark}<tool_call>{mark}<invoke name="f">{several}{mark}</invoke>{mark}</tool_call>'
    assert parse(text, "minimax_m3")[2] == [("f", {"k": ["a", "b"]})]


def test_names_of_parsers():
    names = ToolParserManager.list_registered()
    assert set(FORMATS) <= set(names)
    with pytest.raises(KeyError, match=r"tool parser 'none' is not known; there are .*hermes"):
        ToolParserManager.get_tool_parser("none")
