"""Templates get earlier answers: reasoning by its own name, and calls as templates of channels take them."""

from __future__ import annotations

from typing import Any

import pytest

from vllm.answers.prompts.conversations import fitted

CHANNELS = "<|start|> <|channel|> <|message|> {{ message.thinking }}"


def call(name: str) -> dict[str, Any]:
    return {"id": f"of {name}", "type": "function", "function": {"name": name, "arguments": {}}}


def result(name: str | None) -> dict[str, Any]:
    own = {} if name is None else {"tool_call_id": f"of {name}"}
    return {"role": "tool", **own, "content": f"from {name}"}


@pytest.mark.parametrize("given", ["reasoning", "reasoning_content", "thinking"])
def test_reasoning_has_every_name_that_templates_read(given):
    message = {"role": "assistant", "content": "Yes.", given: "Hm."}
    for template, names in (("{{ message.thinking }}", 3), ("enable_thinking", 2)):
        (found,) = fitted([message], template)
        assert list(found.values()).count("Hm.") == max(names, 2 + (given == "thinking"))
        assert found["reasoning"] == found["reasoning_content"] == "Hm."


def test_what_has_none_stays_as_it_is():
    messages = [
        {"role": "user", "content": "?", "reasoning": "x"},
        {"role": "assistant", "content": "a", "reasoning_content": None, "reasoning": ""},
    ]
    assert fitted(messages, CHANNELS) == messages


def test_one_call_a_message_with_its_result():
    asked = {"role": "assistant", "content": "", "reasoning": "Hm.", "tool_calls": [call("a"), call("b")]}
    last = {"role": "user", "content": "?"}
    found = fitted([asked, result("b"), result(None), result("a"), last], CHANNELS)
    assert [each["role"] for each in found] == ["assistant", "tool", "assistant", "tool", "tool", "user"]
    assert [each["content"] for each in found] == ["", "from a", "", "from b", "from None", "?"]
    assert [each.get("tool_calls") for each in found[:3:2]] == [[call("a")], [call("b")]]
    assert found[0]["thinking"] == "Hm." and "thinking" not in found[2]
    assert fitted([asked, last], "other")[0]["tool_calls"] == [call("a"), call("b")]


def test_a_remark_before_a_call_follows_the_reasoning():
    message = {"role": "assistant", "content": "I look.", "reasoning": "Hm.", "tool_calls": [call("a")]}
    (found,) = fitted([message], CHANNELS)
    assert (found["thinking"], found["content"]) == ("Hm.\n\nI look.", "")
    (alone,) = fitted([{**message, "reasoning": None}], CHANNELS)
    assert alone["content"] == "I look."
