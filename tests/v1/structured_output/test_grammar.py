"""Forms as grammars: what they allow, told by the tokens of a byte tokenizer, against `re` and `jsonschema`'s rules."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
from byte_tokenizer import EOS, VOCAB_SIZE, byte_ids, make_byte_tokenizer
from grammar_walks import accepts, byte_grammars
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm.exceptions import VLLMValidationError
from vllm.sampling_params import StructuredOutputsParams
from vllm.v1.structured_output.grammar import MAX_GRAMMAR_CHARS, grammar_text
from vllm.v1.structured_output.matcher import Grammars

pytest.importorskip("llguidance")


@pytest.fixture(scope="module")
def grammars(tmp_path_factory: pytest.TempPathFactory) -> Grammars:
    return byte_grammars(tmp_path_factory.mktemp("bytes"))


def allows(grammars: Grammars, text: str, *, longest: bool = False, **form: Any) -> bool:
    """Whether a whole answer has the form; see `accepts`."""
    return accepts(grammars.start(grammar_text(StructuredOutputsParams(**form))), text, longest=longest)


SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 3}, "size": {"type": "integer", "minimum": 2}},
    "required": ["name"],
}


@pytest.mark.parametrize(
    ("form", "held", "others"),
    [
        ({"choice": ["stop", "sto", 'a"b\\', "é"]}, ["stop", "sto", 'a"b\\', "é"], ["st", "stopp", "e", ""]),
        ({"regex": "[0-9]{3}-(a|b)+"}, ["123-a", "000-ab"], ["12-a", "123-", "x123-a"]),
        ({"json": SCHEMA}, ['{"name":"a"}', '{ "name": "ab",\n"size": 2}'], ['{"size":2}', '{"name":"abcd"}', "[]"]),
        ({"json": SCHEMA}, ['{\n    "name": "a"\n}'], ['{  "name": "a"}', '{"name":\n\n\n"a"}', '{\t"name":"a"}']),
        ({"json": json.dumps(SCHEMA)}, ['{"name":"a","x":1}'], ['{"name":1}']),
        ({"json": SCHEMA, "disable_additional_properties": True}, ['{"name":"a"}'], ['{"name":"a","x":1}']),
        ({"json": SCHEMA, "disable_any_whitespace": True}, ['{"name":"a"}'], ['{"name": "a"}', '{ "name":"a"}']),
        ({"json": SCHEMA, "whitespace_pattern": "_"}, ['{_"name":_"a"_}'], ['{"name": "a"}']),
        ({"json": True}, ["1", '{"a": [null]}'], ["x"]),
        ({"json_object": True}, ["{}", '{"a": [1, null]}'], ["[]", "1", '{"a"}']),
        ({"grammar": 'root ::= "a" root "b" | "c"'}, ["c", "aacbb"], ["acbb", "ab"]),
        ({"grammar": 'start: "x" NUMBER\nNUMBER: /[0-9]+/'}, ["x1", "x007"], ["x", "1"]),
    ],
)
def test_what_a_form_allows(grammars: Grammars, form: Any, held: list[str], others: list[str]) -> None:
    for longest in (False, True):
        assert [text for text in held if not allows(grammars, text, longest=longest, **form)] == []
    assert [text for text in others if allows(grammars, text, **form)] == []


def test_tags_in_free_text(grammars: Grammars) -> None:
    structure = {"begin": "<f=a>", "schema": {"type": "integer"}, "end": "</f>"}
    form = {"structural_tag": json.dumps({"structures": [structure], "triggers": ["<f="]})}
    for text, is_held in (("free", True), ("so <f=a>12</f> or", True), ("<f=a>x</f>", False), ("<f=b>", False)):
        assert allows(grammars, text, **form) is is_held, text


PATTERNS = st.recursive(
    st.sampled_from(["a", "b", "ab", "[ab]", "[^a]", "c?", "é"]),
    lambda inner: st.one_of(
        st.tuples(inner, inner).map("".join),
        st.tuples(inner, inner).map(lambda pair: f"({pair[0]}|{pair[1]})"),
        inner.map(lambda each: f"({each}){{0,2}}"),
    ),
    max_leaves=5,
)


@settings(max_examples=150, deadline=None)
@given(pattern=PATTERNS, text=st.text("abcé", max_size=5))
def test_regular_expressions_match_as_pythons(grammars: Grammars, pattern: str, text: str) -> None:
    assert allows(grammars, text, regex=pattern) is (re.fullmatch(pattern, text) is not None)


@settings(max_examples=100, deadline=None)
@given(choices=st.lists(st.text(st.characters(codec="utf-8"), min_size=1, max_size=4), min_size=1, max_size=4))
def test_choices_are_held_and_their_beginnings_are_not(grammars: Grammars, choices: list[str]) -> None:
    for choice in choices:
        assert allows(grammars, choice, choice=choices)
        if choice[:-1] not in choices:
            assert not allows(grammars, choice[:-1], choice=choices)


TAG = {"begin": "a", "schema": {}, "end": ""}


@pytest.mark.parametrize(
    ("form", "says"),
    [
        ({"json": "{"}, "structured_outputs.json: Expecting"),
        ({"json": "[]"}, "a JSON schema is an object"),
        ({"structural_tag": "{}"}, "structures"),
        (
            {"structural_tag": {"structures": [{"begin": "a", "schema": {}, "end": ""}], "triggers": ["b"]}},
            "no trigger",
        ),
        ({"regex": "a" * (MAX_GRAMMAR_CHARS + 1)}, f"at most {MAX_GRAMMAR_CHARS} characters"),
    ],
)
def test_a_form_that_cannot_be_read(form: Any, says: str) -> None:
    with pytest.raises(VLLMValidationError, match=says) as caught:
        grammar_text(StructuredOutputsParams(**form))
    assert caught.value.parameter == "structured_outputs"


@pytest.mark.parametrize(
    ("form", "says"),
    [
        ({"regex": "("}, "unclosed group"),
        ({"grammar": "start: other"}, "unknown name"),
        ({"json": {"unevaluatedProperties": False}}, "unevaluatedProperties"),
        ({"json": {"allOf": [{"type": "string"}, {"type": "number"}]}}, "Unsatisfiable"),
        ({"json": False}, "not"),
    ],
)
def test_a_grammar_that_does_not_compile(grammars: Grammars, form: Any, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        grammars.start(grammar_text(StructuredOutputsParams(**form)))


def test_matchers_of_a_grammar_are_apart(grammars: Grammars) -> None:
    text = grammar_text(StructuredOutputsParams(choice=["ab", "cd"]))
    first, second = grammars.start(text), grammars.start(text)
    assert first.take(byte_ids("ab")) is None
    assert second.take(byte_ids("cd")) is None
    assert "does not allow" in str(grammars.start(text).take(byte_ids("b")))


def test_the_cache_is_bounded(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vllm.v1.structured_output.matcher.MAX_CACHED_CHARS", 2000)
    own = Grammars(make_byte_tokenizer(tmp_path).backend.to_str(), VOCAB_SIZE, [EOS])
    for index in range(100):
        own.start(grammar_text(StructuredOutputsParams(choice=[f"{index} {'x' * 100}"])))
    assert 1 < len(own._compiled) < 20


def test_a_model_without_an_end_is_refused(tmp_path: Any) -> None:
    with pytest.raises(VLLMValidationError, match="no end-of-sequence token"):
        Grammars(make_byte_tokenizer(tmp_path).backend.to_str(), VOCAB_SIZE, [])
