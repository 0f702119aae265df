"""Grammars of answers in channels: what gpt-oss writes, and its template, with the calls that schemas allow."""

from __future__ import annotations

import json

import pytest
from test_strict_calls import HELD, OTHER, OTHERS, WEATHER, Forms

MARKERS = ["<|start|>", "<|channel|>", "<|message|>", "<|constrain|>", "<|end|>", "<|call|>", "<|return|>"]
NEXT = "<|end|><|start|>assistant"
THOUGHT, REMARK = f"<|channel|>analysis<|message|>Hm: {{x}}.{NEXT}", f"<|channel|>commentary<|message|>I look.{NEXT}"
HEADERS = (
    "<|channel|>commentary to=functions.{name} <|constrain|>json<|message|>",
    " to=functions.{name}<|channel|>commentary json<|message|>",
    "<|channel|>commentary to=functions.{name}<|message|>",
    " to=functions.{name}<|channel|>commentary<|constrain|>json<|message|>",
)
FINAL = "<|channel|>final<|message|>"


def call(arguments: object, name: str = "weather", header: str = HEADERS[0]) -> str:
    return header.format(name=name) + json.dumps(arguments, ensure_ascii=False) + "<|call|>"


@pytest.fixture(scope="module", params=["texts", "tokens"])
def forms(request) -> Forms:
    return Forms(MARKERS, ("<|call|>", "<|return|>")) if request.param == "tokens" else Forms([])


def test_strict_calls_in_any_place(forms):
    grammar = forms.of("openai").free([WEATHER, OTHER], True, None)
    assert all(forms.holds(grammar, call(arguments)) for arguments in HELD)
    assert all(forms.holds(grammar, call(HELD[0], header=header)) for header in HEADERS)
    assert not any(forms.holds(grammar, call(arguments)) for arguments in OTHERS)
    for before in ("", THOUGHT + REMARK, THOUGHT + THOUGHT):
        assert forms.holds(grammar, before + call({"any": ["thing"]}, "now"))
        assert forms.holds(grammar, f"{before}{FINAL}Yes, {{it}} is.\n")
        assert not forms.holds(grammar, before + call({}, "never"))
        assert not forms.holds(grammar, before + call(OTHERS[0]))
    assert forms.holds(grammar, f"{FINAL}Yes.<|return|>")
    if not forms.ends:  # otherwise an answer ends with its first call
        assert forms.holds(grammar, f"{call(HELD[0])}<|start|>assistant{call(HELD[1])}")
    for unended in ("", THOUGHT, "<|channel|>analysis<|message|>Hm", REMARK):
        assert not forms.holds(grammar, unended)


def test_one_call_at_most(forms):
    grammar = forms.of("openai").free([WEATHER], False, None)
    assert forms.holds(grammar, call(HELD[0]))
    assert not forms.holds(grammar, f"{call(HELD[0])}<|start|>assistant{call(HELD[1])}")


def test_forced_calls_may_follow_reasoning(forms):
    grammar = forms.of("openai").forced([WEATHER], False)
    for before in ("", THOUGHT, THOUGHT + REMARK):
        assert forms.holds(grammar, before + call(HELD[0]))
        assert not forms.holds(grammar, f"{before}{FINAL}Yes.")
        assert not forms.holds(grammar, before + call(OTHERS[0]))


def test_reasoning_that_comes_before(forms):
    own = forms.of("openai")
    own.thinks = False
    grammar = own.free([WEATHER], False, None)
    assert forms.holds(grammar, REMARK + call(HELD[0])) and not forms.holds(grammar, THOUGHT + call(HELD[0]))


def test_calls_beside_a_form(forms):
    grammar = forms.of("openai").free([WEATHER], False, {"enum": [7]})
    for final in (FINAL, "<|channel|>final <|constrain|>json<|message|>"):
        assert forms.holds(grammar, f"{THOUGHT}{final}7") and not forms.holds(grammar, f"{THOUGHT}{final}8")
    assert forms.holds(grammar, call(HELD[0])) and not forms.holds(grammar, call(OTHERS[0]))
