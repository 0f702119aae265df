"""Structural tags: what each format allows, told by the bytes of answers, with and without tokens for tags."""

from __future__ import annotations

import json
from typing import Any

import pytest
from byte_tokenizer import EOS, VOCAB_SIZE, byte_ids, make_byte_tokenizer
from grammar_walks import accepts, byte_grammars

from vllm.exceptions import VLLMValidationError
from vllm.sampling_params import StructuredOutputsParams
from vllm.v1.structured_output.grammar import grammar_text
from vllm.v1.structured_output.matcher import Grammars

pytest.importorskip("llguidance")

CALL, END_CALL = VOCAB_SIZE, VOCAB_SIZE + 1
ANY = {"type": "any_text"}
INTEGER = {"type": "json_schema", "json_schema": {"type": "integer"}}
WORD = {"type": "regex", "pattern": "[a-z]+"}


def const(value: str) -> dict[str, Any]:
    return {"type": "const_string", "value": value}


def tag(begin: str, content: Any, end: Any) -> dict[str, Any]:
    return {"type": "tag", "begin": begin, "content": content, "end": end}


def sequence(*elements: Any) -> dict[str, Any]:
    return {"type": "sequence", "elements": elements}


def triggered(*tags: Any, triggers: tuple[str, ...] = ("<",), **options: Any) -> dict[str, Any]:
    return {"type": "triggered_tags", "triggers": triggers, "tags": tags, **options}


def separated(*tags: Any, **options: Any) -> dict[str, Any]:
    return {"type": "tags_with_separator", "separator": ", ", "tags": tags, **options}


def text_of(form: Any) -> str:
    return grammar_text(StructuredOutputsParams(structural_tag=json.dumps({"type": "structural_tag", "format": form})))


@pytest.fixture(scope="module")
def grammars(tmp_path_factory: pytest.TempPathFactory) -> Grammars:
    return byte_grammars(tmp_path_factory.mktemp("bytes"))


@pytest.fixture(scope="module")
def with_tokens(tmp_path_factory: pytest.TempPathFactory) -> Grammars:
    """The byte tokenizer with two more tokens."""
    backend = make_byte_tokenizer(tmp_path_factory.mktemp("tokens")).backend
    backend.add_special_tokens(["<tool_call>", "</tool_call>"])
    return Grammars(backend.to_str(), VOCAB_SIZE + 2, [EOS])


A, B = tag("<a>", INTEGER, "</a>"), tag("<b>", ANY, ["</b>", "</c>"])


@pytest.mark.parametrize(
    ("form", "held", "others"),
    [
        (const('say "é/\n"'), ['say "é/\n"'], ["say"]),
        (WORD, ["ab"], ["", "a1"]),
        ({"type": "regex", "pattern": r"a/b\/[\n]"}, ["a/b/\n"], ["a/b"]),
        (INTEGER, ["12"], ["x", "1.5"]),
        (
            {"type": "json_schema", "json_schema": {"type": "array", "items": {"type": "integer"}}},
            ["[1, 2]"],
            ["[1,  2]"],
        ),
        (ANY, ["", "a\n<b>"], []),
        ({"type": "any_text", "excludes": ["no", "a.b"]}, ["axb n o"], ["a.b", "know"]),
        ({"type": "grammar", "grammar": 'root ::= "a" root "b" | "c"'}, ["c", "aacbb"], ["ac"]),
        (tag("<g>", {"type": "grammar", "grammar": 'start: "x" "y"?'}, "</g>"), ["<g>xy</g>"], ["<g>y</g>"]),
        (A, ["<a>12</a>"], ["<a>x</a>", "12", "<a>1</a>x"]),
        (tag("<w>", WORD, "end"), ["<w>abend"], ["<w>end", "<w>ab"]),
        (B, ["<b>x\ny</c>", "<b></b>"], ["<b></b></b>", "<b>x"]),
        (tag("<b>", ANY, ""), ["<b>x"], ["x"]),
        (tag("<b>", WORD, ["", "."]), ["<b>x", "<b>x."], ["<b>."]),
        (sequence(const("x"), WORD, const("y")), ["xay", "xayyy"], ["xy"]),
        (sequence(tag("<think>", ANY, "</think>"), A), ["<think>so</think><a>1</a>"], ["<think></think>", "<a>1</a>"]),
        (tag("<x>", sequence(const("a"), ANY), "</x>"), ["<x>a so</x>"], ["<x>b</x>"]),
        ({"type": "or", "elements": [A, const("no"), WORD]}, ["<a>1</a>", "no", "nob"], ["<a>"]),
        ({"type": "optional", "content": A}, ["", "<a>1</a>"], ["<a>1</a><a>1</a>"]),
        ({"type": "plus", "content": A}, ["<a>1</a>", "<a>1</a><a>1</a>"], [""]),
        ({"type": "star", "content": const("ab")}, ["", "abab"], ["a"]),
        ({"type": "repeat", "content": A, "min": 1, "max": 2}, ["<a>1</a><a>1</a>"], ["", 3 * "<a>1</a>"]),
        ({"type": "repeat", "content": WORD, "min": 2}, ["ab"], ["a"]),
        (triggered(A, B), ["", "free", "so <a>1</a> or <b>x</b>."], ["<a>x</a>", "<", "<c>", "<b>x"]),
        (triggered(A, B, triggers=("<a", "<b")), ["<c>", "x<a>1</a>"], ["<ab", "<b"]),
        (triggered(A, at_least_one=True), ["<a>1</a>", "<a>1</a> so <a>2</a>x"], ["", "x<a>1</a>"]),
        (triggered(A, stop_after_first=True), ["", "free", "so <a>1</a>"], ["<a>1</a>x"]),
        (triggered(A, at_least_one=True, stop_after_first=True), ["<a>1</a>"], ["", "x<a>1</a>", "<a>1</a>x"]),
        (triggered(A, excludes=["no"]), ["so <a>1</a>"], ["no", "no <a>1</a>", "<a>1</a>no"]),
        (tag("[", triggered(A), "]"), ["[so <a>1</a>]", "[]"], ["[so <a>1</a>", "[<]"]),
        (separated(A, B), ["", "<a>1</a>", "<b></b>, <a>1</a>, <a>2</a>"], ["<a>1</a><a>2</a>", "<a>1</a>, "]),
        (separated(A, at_least_one=True), ["<a>1</a>, <a>2</a>"], [""]),
        (separated(A, stop_after_first=True), ["", "<a>1</a>"], ["<a>1</a>, <a>2</a>"]),
        (tag("[", separated(A), "]"), ["[]", "[<a>1</a>]"], ["["]),
    ],
)
def test_what_a_format_allows(grammars: Grammars, form: Any, held: list[str], others: list[str]) -> None:
    text = text_of(form)
    for longest in (False, True):
        assert [each for each in held if not accepts(grammars.start(text), each, longest=longest)] == []
    assert [each for each in others if accepts(grammars.start(text), each)] == []


def test_schemas_in_tags_have_the_options_of_schemas(grammars: Grammars) -> None:
    form = tag("<a>", {"type": "json_schema", "json_schema": {"type": "object", "properties": {"n": {}}}}, "</a>")
    options: dict[str, Any] = {"disable_any_whitespace": True, "disable_additional_properties": True}
    params = StructuredOutputsParams(structural_tag={"format": form}, **options)  # type: ignore[arg-type]
    for answer, is_held in (('{"n":1}', True), ('{"n": 1}', False), ('{"m":1}', False)):
        assert accepts(grammars.start(grammar_text(params)), f"<a>{answer}</a>") is is_held


def holds(grammars: Grammars, form: Any, *parts: str | int) -> bool:
    """Whether an answer is held: texts as their bytes, and tokens."""
    ids = [each for part in parts for each in ([part] if isinstance(part, int) else byte_ids(part))]
    return grammars.start(text_of(form)).take([*ids, EOS]) is None


TOOL = tag("<tool_call>\n", INTEGER, "\n</tool_call>")


@pytest.mark.parametrize("trigger", ["<tool_call>", "<tool", "<tool_call>\n"])
def test_a_trigger_is_a_token_where_there_is_one_and_text_elsewhere(
    grammars: Grammars, with_tokens: Grammars, trigger: str
) -> None:
    form = triggered(TOOL, triggers=(trigger,))
    text = "so <tool_call>\n1\n</tool_call> or <tool_call>\n2\n</tool_call>"
    assert accepts(grammars.start(text_of(form)), text)
    assert not accepts(grammars.start(text_of(form)), text.replace("2", "x"))
    call = (CALL, "\n1\n", END_CALL)
    assert holds(with_tokens, form, "so ", *call, " or", *call)
    assert holds(with_tokens, form, "free")
    assert not holds(with_tokens, form, CALL, "\nx\n", END_CALL)
    assert not holds(with_tokens, form, CALL, "\n1\n")
    assert not holds(with_tokens, form, END_CALL)


def test_free_text_ends_at_a_token(with_tokens: Grammars) -> None:
    form = sequence(tag("<tool_call>", ANY, "\n</tool_call>"), const("."))
    assert holds(with_tokens, form, CALL, "a\nb\n", END_CALL, ".")
    assert not holds(with_tokens, form, CALL, "a\nb", END_CALL, ".")
    assert holds(with_tokens, tag("x", WORD, "y</tool_call>z"), "xay", END_CALL, "z")


def test_the_older_shape_with_a_token(grammars: Grammars, with_tokens: Grammars) -> None:
    structure = {"begin": "<tool_call>", "schema": {"type": "integer"}, "end": "</tool_call>"}
    form = {"structures": [structure], "triggers": ["<tool_call>"]}
    text = grammar_text(StructuredOutputsParams(structural_tag=json.dumps(form)))
    assert accepts(grammars.start(text), "so <tool_call>1</tool_call>")
    assert not accepts(grammars.start(text), "so <tool_call>x</tool_call>")
    assert with_tokens.start(text).take([CALL, *byte_ids("1"), END_CALL, EOS]) is None


@pytest.mark.parametrize(
    ("form", "says"),
    [
        (None, "structural tags consist of objects"),
        ({}, "tag needs type, a text"),
        ({"type": "token", "token": 1}, "format 'token' is not supported"),
        ({**INTEGER, "style": "qwen_xml"}, "style 'qwen_xml'"),
        ({"type": "json_schema", "json_schema": "{}"}, "json_schema needs json_schema"),
        (const(1), "needs value, a text"),  # type: ignore[arg-type]
        (tag("<a>", INTEGER, 1), "needs end, a list"),
        (tag("<a>", {"type": "regex"}, ""), "regex needs pattern"),
        (tag("<a>", ANY, ["", "x"]), "free text must be followed"),
        (sequence(ANY, A), "free text must be followed"),
        (triggered(A, triggers=("<b",)), "no trigger begins"),
        (triggered(), "is empty"),
        (triggered(const("a")), "tags must be of type tag"),
        ({"type": "repeat", "content": A, "min": 2, "max": 1}, "repeat needs"),
        ({"type": "grammar", "grammar": "root ::= other"}, "other"),
    ],
)
def test_what_is_refused(form: Any, says: str) -> None:
    with pytest.raises(VLLMValidationError, match=says) as caught:
        text_of(form)
    assert caught.value.parameter == "structured_outputs"


def test_a_tag_that_is_nested_too_deeply() -> None:
    form: Any = WORD
    for _ in range(2000):
        form = {"type": "optional", "content": form}
    with pytest.raises(VLLMValidationError, match="nested too deeply"):
        grammar_text(StructuredOutputsParams(structural_tag={"format": form}))  # type: ignore[arg-type]
