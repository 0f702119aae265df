"""Reasoning apart from the content of chat's answers, grammars after it, and its budget."""

from __future__ import annotations

import json
from typing import Any

import pytest
from asgi import AppThread, Serve
from forced_tokens import FORCED

TEMPLATE = (
    "{% for m in messages %}{{ m.role }}: {{ m.content }} {{ m.reasoning_content }}\n{% endfor %}assistant:"
    "{% if enable_thinking is defined and not enable_thinking %}<think>\n\n</think>\n\n{% endif %}"
    "{% if inside %}<think>\n{% endif %}<tool_call>"
)
USER = [{"role": "user", "content": "?"}]
TOOLS = [{"type": "function", "function": {"name": "now", "parameters": {"type": "object", "properties": {}}}}]


@pytest.fixture(scope="module")
def server(serve: Serve) -> AppThread:
    return serve(FORCED, chat_template=TEMPLATE, reasoning_parser="qwen3")


def bodied(server: AppThread, text: str | None, **body: Any) -> dict[str, Any]:
    # Spelled as a model would, and as a grammar that forces a mark does.
    ids = server.engine.input_processor.tokenizer.encode(text or "", add_special_tokens=False)
    forced = {"vllm_xargs": {"forced": ids}, "temperature": 0} if ids else {}
    return {"model": "tiny", "messages": USER, "max_tokens": len(ids) or 80, **forced, **body}


def ask(server: AppThread, text: str | None = None, **body: Any) -> dict[str, Any]:
    return server.post("/v1/chat/completions", **bodied(server, text, **body))["choices"][0]


def streamed(server: AppThread, text: str, **body: Any) -> list[dict[str, Any]]:
    response = server.request("POST", "/v1/chat/completions", json=bodied(server, text, stream=True, **body))
    lines = [line[6:] for line in response.text.splitlines() if line.startswith("data: ")]
    return [choice for line in lines[:-1] for choice in json.loads(line)["choices"]]


TEXT = "<think>\nHm.\n</think>\n\nYes."


def test_reasoning_is_apart_from_the_content(server):
    message = ask(server, TEXT)["message"]
    assert (message["reasoning"], message["content"]) == ("\nHm.\n", "\n\nYes.")
    assert message["reasoning_content"] == message["reasoning"]
    deltas = [chunk["delta"] for chunk in streamed(server, TEXT)]
    assert "".join(each.get("reasoning") or "" for each in deltas) == "\nHm.\n"
    assert "".join(each.get("reasoning_content") or "" for each in deltas) == "\nHm.\n"
    assert "".join(each.get("content") or "" for each in deltas) == "\n\nYes."


def test_a_mark_that_is_cut_before_a_form_is_no_content(server):
    form = {"type": "json_schema", "json_schema": {"name": "a", "schema": {"type": "integer"}}}
    for text in ("<", "<thi"):
        assert not ask(server, text, response_format=form)["message"]["content"]
        deltas = [chunk["delta"] for chunk in streamed(server, text, response_format=form)]
        assert not any(each.get("content") for each in deltas)
        assert ask(server, text)["message"]["content"] == text
    assert ask(server, "7", response_format=form)["message"]["content"] == "7"


def test_reasoning_may_be_left_out(server):
    message = ask(server, TEXT, include_reasoning=False)["message"]
    assert (message["content"], message["reasoning"]) == ("\n\nYes.", None)
    assert "Hm." not in str(message)
    deltas = [chunk["delta"] for chunk in streamed(server, TEXT, include_reasoning=False)]
    assert not any("reasoning" in each for each in deltas)


def test_prompts_begin_or_end_it(server):
    assert ask(server, "Hm.</think>Yes.", chat_template_kwargs={"inside": True})["message"]["reasoning"] == "Hm."
    for fields in ({"chat_template_kwargs": {"enable_thinking": False}}, {"reasoning_effort": "none"}):
        message = ask(server, "Yes.", **fields)["message"]
        assert (message["reasoning"], message["content"]) == (None, "Yes.")


def test_calls_after_reasoning(server):
    text = '<think>Hm.</think>\n\n<tool_call>{"name": "now", "arguments": {}}</tool_call>'
    message = ask(server, text, tools=TOOLS)["message"]
    assert (message["reasoning"], message["content"]) == ("Hm.", None)
    assert message["tool_calls"][0]["function"] == {"name": "now", "arguments": "{}"}


def test_history_reaches_the_template(server):
    history = [*USER, {"role": "assistant", "content": "Yes.", "reasoning_content": "Hm."}, *USER]
    prompt = server.post("/v1/chat/completions/render", messages=history)["prompt"]
    assert "assistant: Yes. Hm.\n" in prompt


def test_a_form_begins_after_the_reasoning(server):
    form = {"structured_outputs": {"choice": ["left", "right"]}, "max_tokens": 60}
    message = ask(server, "<think>x {</think>", **form)["message"]
    assert message["reasoning"] == "x {" and message["content"] in ("left", "right")
    # An answer that does without.
    message = ask(server, "le", **form)["message"]
    assert (message["reasoning"], message["content"]) == (None, "left")
    inside = {"chat_template_kwargs": {"inside": True}}
    message = ask(server, "x</think>", **form, **inside)["message"]
    assert message["reasoning"] == "x" and message["content"] in ("left", "right")


def test_choices_are_read_after_the_reasoning(server):
    form = {"structured_outputs": {"choice": ["left", "right"]}, "max_tokens": 60, "choice_readings": True}
    choice = ask(server, "<think>x</think>", **form)
    assert choice["message"]["content"] in ("left", "right") and choice["message"]["reasoning"] == "x"
    assert len(choice["choice_readings"]) == 2


def test_forced_calls_come_after_the_reasoning(server):
    message = ask(server, "<think>x</think>", tools=TOOLS, tool_choice="required", max_tokens=120)["message"]
    assert message["reasoning"] == "x"
    assert {call["function"]["name"] for call in message["tool_calls"]} == {"now"}


@pytest.mark.parametrize("budget", [0, 1, 7])
def test_a_spent_budget_ends_the_reasoning(server, budget):
    options = {"thinking_token_budget": budget, "ignore_eos": True, "seed": 1, "temperature": 1}
    message = ask(server, None, chat_template_kwargs={"inside": True}, **options)["message"]
    # A token of this tokenizer is a byte, or a few.
    reasoning = message["reasoning"] or ""
    assert message["content"] and len(reasoning.encode()) <= 5 * budget + 5 and bool(reasoning) == bool(budget)
    usage = ask(server, None, chat_template_kwargs={"inside": True}, **{**options, "thinking_token_budget": -1})
    assert usage["message"]["content"] is None


def test_readings_say_which_part_they_belong_to(server):
    text = '<think>Hm.</think>Yes.<tool_call>{"name": "now", "arguments": {}}</tool_call> a'
    body = {"logprobs": True, "labels": ["a"], "tools": TOOLS}
    choice = ask(server, text, **body)
    marked: dict[str, str] = {}
    for entry in choice["logprobs"]["content"]:
        marked[entry["part"]] = marked.get(entry["part"], "") + entry["token"]
    assert marked == {
        "reasoning": "<think>Hm.</think>",
        "content": "Yes. a",
        "tool_call": '<tool_call>{"name": "now", "arguments": {}}</tool_call>',
    }
    parts = [entry["part"] for entry in choice["logprobs"]["content"]]
    assert [each["part"] for each in choice["readings"]] == parts
    chunks = streamed(server, text, **body)
    assert [entry["part"] for chunk in chunks for entry in (chunk["logprobs"] or {}).get("content") or ()] == parts
    assert [each["part"] for chunk in chunks for each in chunk.get("readings") or ()] == parts


def test_a_budget_needs_a_parser(server):
    body = {"model": "tiny", "messages": USER, "thinking_token_budget": 5}
    server.state._formats.clear()
    args = server.state.args
    object.__setattr__(args, "reasoning_parser", None)
    try:
        response = server.request("POST", "/v1/chat/completions", json=body)
        assert response.status_code == 400
        assert response.json()["error"]["param"] == "thinking_token_budget"
        assert ask(server, TEXT)["message"]["content"] == TEXT
    finally:
        object.__setattr__(args, "reasoning_parser", "qwen3")
        server.state._formats.clear()


ASKS = {"role": "user", "content": "What is <think>?"}
CUT = [*USER, {"role": "assistant", "content": "<think>I was cut"}, *USER]


@pytest.mark.parametrize("messages", [[ASKS], CUT, [{"role": "system", "content": "<think> first"}, *USER]])
def test_words_of_turns_begin_no_reasoning(server, messages):
    message = ask(server, "It is markup.", messages=messages)["message"]
    assert (message["reasoning"], message["content"]) == (None, "It is markup.")
    deltas = [chunk["delta"] for chunk in streamed(server, "It is markup.", messages=messages)]
    assert "".join(each.get("content") or "" for each in deltas) == "It is markup."
    # A form binds the answer from its beginning, and a budget counts none of it.
    form = {"structured_outputs": {"choice": ["left", "right"]}, "max_tokens": 60, "messages": messages}
    message = ask(server, "le", **form)["message"]
    assert (message["reasoning"], message["content"]) == (None, "left")
    message = ask(server, "It is markup.", messages=messages, thinking_token_budget=2)["message"]
    assert (message["reasoning"], message["content"]) == (None, "It is markup.")
    # A beginning by the template counts all the same.
    message = ask(server, "Hm.</think>Yes.", messages=messages, chat_template_kwargs={"inside": True})["message"]
    assert (message["reasoning"], message["content"]) == ("Hm.", "Yes.")


def test_words_of_turns_begin_none_over_other_doors(server):
    body = bodied(server, "It is markup.", messages=[ASKS])
    answer = server.request("POST", "/v1/messages", json=body).json()
    assert [(each["type"], each.get("text")) for each in answer["content"]] == [("text", "It is markup.")]
    body["input"] = ASKS["content"]
    body["max_output_tokens"] = body.pop("max_tokens")
    del body["messages"]
    answer = server.request("POST", "/v1/responses", json=body).json()
    assert [each["type"] for each in answer["output"]] == ["message"]
    assert answer["output"][0]["content"][0]["text"] == "It is markup."


def test_a_message_that_goes_on_may_have_begun_it(server):
    messages = [ASKS, {"role": "assistant", "content": "<think>Let me"}]
    options = {"messages": messages, "add_generation_prompt": False, "continue_final_message": True}
    message = ask(server, " see.</think>Yes.", **options)["message"]
    assert (message["reasoning"], message["content"]) == (" see.", "Yes.")
