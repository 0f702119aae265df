"""Questions and inputs as OpenAI sends them: what is read, and what is refused."""

from __future__ import annotations

import pytest

from vllm.decisions.content import MAX_JSON_BYTES, MAX_JSON_DEPTH, MAX_JSON_VALUES
from vllm.decisions.conversation import conversations, parse_input, transcript
from vllm.decisions.plan import orders
from vllm.decisions.questions import parse_questions
from vllm.exceptions import VLLMValidationError

CALLS = [
    {"role": "developer", "content": "Be brief."},
    {
        "role": "user",
        "content": [{"type": "input_text", "text": "Where is it?"}, {"type": "input_json", "data": {"a": 1}}],
    },
    {"type": "function_call", "call_id": "1", "name": "find", "namespace": "post", "arguments": '{"id": 7}'},
    {"type": "custom_tool_call", "call_id": "2", "name": "shell", "input": "ls"},
    {"type": "function_call_output", "call_id": "1", "output": [{"type": "input_text", "text": "Oslo"}]},
    {"type": "custom_tool_call_output", "call_id": "2", "output": "a.txt"},
    {
        "role": "assistant",
        "content": [{"type": "output_text", "text": "In Oslo."}, {"type": "refusal", "refusal": "No."}],
    },
]  # fmt: skip


def test_text_and_boolean_of_one_spelling_are_two_choices():
    choices = [{"value": True}, {"value": "true"}, {"value": "other", "description": "neither"}]
    (question,) = parse_questions({"type": "choice", "instructions": "Which?", "choices": choices})
    assert [option.value for option in question.options] == [True, "true", "other"]
    assert [option.text for option in question.options] == ["true", '"true"', "other"]
    assert question.options[2].description == "neither" and question.name is None


def test_values_that_differ_are_never_shown_alike():
    choices = [{"value": True}, {"value": "true"}, {"value": '"true"'}, {"value": 'say "true"'}]
    (question,) = parse_questions({"type": "choice", "instructions": "", "choices": choices})
    assert [option.text for option in question.options] == ["true", '"true"', r'"\"true\""', 'say "true"']
    (question,) = parse_questions({"type": "choice", "instructions": "", "choices": choices[1:]})
    assert [option.text for option in question.options] == ["true", '"true"', 'say "true"']


def test_levels_may_have_equal_labels():
    levels = [{"label": "damage", "description": "cosmetic"}, {"label": "damage"}]
    (question,) = parse_questions([{"type": "score", "instructions": [], "levels": levels, "name": "n"}])
    assert [option.value for option in question.options] == [0, 1] and question.name == "n"


def test_instructions_of_parts():
    parts = [{"type": "input_text", "text": "a"}, {"type": "input_json", "data": [{"b": "é"}]}]
    (question,) = parse_questions({"type": "predicate", "instructions": parts})
    assert question.instructions == 'a\n[{"b":"é"}]'


def test_a_conversation_for_templates_that_take_every_role():
    native = next(iter(conversations(parse_input(CALLS), "Q?", has_developer=True)))
    assert [message["role"] for message in native] == [
        "developer",
        "user",
        "assistant",
        "tool",
        "tool",
        "assistant",
        "user",
    ]
    assert native[1]["content"] == 'Where is it?\n{"a":1}'
    calls = [(call["id"], call["function"]["name"], call["function"]["arguments"]) for call in native[2]["tool_calls"]]
    assert calls == [("1", "post.find", {"id": 7}), ("2", "shell", {"input": "ls"})]
    assert native[3] == {"role": "tool", "tool_call_id": "1", "name": "post.find", "content": "Oslo"}
    assert native[5]["content"] == "In Oslo.\nNo." and native[6]["content"] == "Q?"


def test_a_conversation_for_other_templates():
    turns = parse_input(CALLS)
    native, plain, single = conversations(turns, "Q?", has_developer=False)
    assert native[0]["role"] == "system"
    assert [message["role"] for message in plain] == ["system", "user", "assistant", "user", "assistant", "user"]
    assert plain[2]["content"] == 'post.find({"id": 7})\n\nshell(ls)'
    assert plain[3]["content"] == "post.find returned:\nOslo\n\nshell returned:\na.txt"
    assert single == [{"role": "user", "content": f"{transcript(turns)}\n\nQ?"}]


def test_the_question_joins_the_last_users_message():
    turns = parse_input([{"role": "user", "content": "a"}])
    assert next(iter(conversations(turns, "Q?", False))) == [{"role": "user", "content": "a\n\nQ?"}]
    for empty in ("", [], [{"role": "user", "content": []}]):
        assert next(iter(conversations(parse_input(empty), "Q?", False))) == [{"role": "user", "content": "Q?"}]


@pytest.mark.parametrize(
    ("item", "says"),
    [
        ({"type": "function_call_output", "call_id": "9", "output": ""}, "names no function_call before it"),
        ({"type": "custom_tool_call_output", "call_id": "1", "output": ""}, "names no custom_tool_call before it"),
        ({"type": "function_call", "call_id": "", "name": "f", "arguments": ""}, "call_id must not be empty"),
        ({"role": "user", "content": [{"type": "input_text", "text": "a", "prompt_cache_breakpoint": 1}]}, "an object"),
        ({"role": "assistant", "content": "a", "phase": "x"}, "phase"),
        ({"role": "user", "content": "a", "phase": "final"}, "unknown field"),
        ({"role": "user", "content": [{"type": "input_json", "data": [1]}]}, "list of objects"),
    ],
)
def test_malformed_items_are_refused_by_name(item, says):
    first = {"type": "function_call", "call_id": "1", "name": "f", "arguments": "{}"}
    with pytest.raises(VLLMValidationError, match=says) as caught:
        parse_input([first, item])
    assert caught.value.parameter.startswith("input[1]")


def test_limits_of_json_parts():
    deep: dict = {}
    for _ in range(MAX_JSON_DEPTH):
        deep = {"a": deep}
    for data in (deep, {"a": [0] * MAX_JSON_VALUES}, {"a": "x" * MAX_JSON_BYTES}):
        with pytest.raises(VLLMValidationError, match=r"input\[0\].content\[0\].data"):
            parse_input([{"role": "user", "content": [{"type": "input_json", "data": data}]}])
    parse_input([{"role": "user", "content": [{"type": "input_json", "data": deep["a"]}]}])


def test_orders_are_distinct_and_balanced():
    assert orders(3, 1) == [[0, 1, 2]] and orders(2, 9) == [[0, 1], [1, 0]] and orders(1, 5) == [[0]]
    for count in (2, 3, 4, 7, 255):
        for wanted in (2, 4, 10):
            found = orders(count, wanted)
            assert len({tuple(order) for order in found}) == len(found) == min(wanted, 2 * count if count > 2 else 2)
            assert all(sorted(order) == list(range(count)) for order in found)
            places = [sum(order.index(option) for order in found) for option in range(count)]
            assert len(set(places)) == 1
