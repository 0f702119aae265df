"""Answers in channels, as gpt-oss writes them: strict and forced calls, forms and budgets beside reasoning."""

from __future__ import annotations

import json
from typing import Any

import pytest
from asgi import AppThread, Serve
from channel_template import TEMPLATE
from forced_tokens import FORCED

CITY = {"type": "object", "properties": {"city": {"enum": ["Oslo", "Rome"]}}, "required": ["city"]}
TOOLS = [{"type": "function", "function": {"name": "weather", "parameters": CITY, "strict": True}}]
THOUGHT = "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant"
CALL = "<|channel|>commentary to=functions."
FORM = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"enum": [7, 8]}}}


@pytest.fixture(scope="module")
def server(serve: Serve) -> AppThread:
    return serve(FORCED, chat_template=TEMPLATE)


def ask(server: AppThread, beginning: str, **body: Any) -> dict[str, Any]:
    """The choice of an answer that begins so, and goes on as the model and the grammar will."""
    ids = server.engine.input_processor.tokenizer.encode(beginning, add_special_tokens=False)
    body = {
        "vllm_xargs": {"forced": ids},
        "max_tokens": 400,
        "seed": 1,
        "messages": [{"role": "user", "content": "?"}],
    } | body
    return server.post("/v1/chat/completions", **body)["choices"][0]


@pytest.mark.parametrize("choice", ["auto", "required"])
def test_calls_after_reasoning_fit_their_schema(server, choice):
    message = ask(server, THOUGHT + CALL, tools=TOOLS, tool_choice=choice, parallel_tool_calls=False)["message"]
    (call,) = message["tool_calls"]
    assert call["function"]["name"] == "weather" and message["reasoning"] == "Hm."
    assert json.loads(call["function"]["arguments"])["city"] in ("Oslo", "Rome")


def test_answers_are_parted_without_a_flag(server):
    choice = ask(server, THOUGHT + "<|channel|>final<|message|>Yes.", max_tokens=95)
    assert choice["message"]["reasoning"] == "Hm." and choice["message"]["content"].startswith("Yes.")


@pytest.mark.parametrize("kind", ["", " <|constrain|>json"])
@pytest.mark.parametrize("tools", [{}, {"tools": TOOLS}])
def test_a_form_of_what_is_for_the_user(server, kind, tools):
    message = ask(server, f"{THOUGHT}<|channel|>final{kind}<|message|>", response_format=FORM, **tools)["message"]
    assert (message["reasoning"], message["content"]) in (("Hm.", "7"), ("Hm.", "8"))


@pytest.mark.parametrize("tools", [[], TOOLS])
def test_a_spent_budget_ends_the_reasoning_but_no_call(server, tools):
    beginning = "<|channel|>analysis<|message|>Hm."
    body = {"thinking_token_budget": 3, "tools": tools, "parallel_tool_calls": False}
    assert ask(server, beginning, max_tokens=80, **body)["message"]["reasoning"] == "Hm."
    if tools:
        (call,) = ask(server, THOUGHT + CALL, **body)["message"]["tool_calls"]
        assert json.loads(call["function"]["arguments"])["city"] in ("Oslo", "Rome")


def test_responses_follow_their_reasoning_and_calls(server):
    ids = server.engine.input_processor.tokenizer.encode(
        f'{THOUGHT}{CALL}weather<|message|>{{"city": "Rome"}}<|call|>', add_special_tokens=False
    )
    tools = [{"type": "function", "name": "weather", "parameters": CITY}]
    body = {"tools": tools, "max_output_tokens": len(ids), "vllm_xargs": {"forced": ids}, "temperature": 0}
    first = server.post("/v1/responses", input="?", **body)
    reasoning, call = first["output"]
    assert (reasoning["content"][0]["text"], call["arguments"]) == ("Hm.", '{"city": "Rome"}')
    output = {"type": "function_call_output", "call_id": call["call_id"], "output": "rain"}
    second = server.post(
        "/v1/responses", input=[output], previous_response_id=first["id"], return_token_ids=True, **body
    )
    prompt = server.engine.input_processor.tokenizer.decode(second["prompt_token_ids"])
    assert prompt.endswith(
        "<|start|>user<|message|>?<|end|><|start|>assistant<|channel|>analysis<|message|>Hm.<|end|>"
        '<|start|>assistant to=functions.weather<|channel|>commentary json<|message|>{"city": "Rome"}<|call|>'
        "<|start|>functions.weather to=assistant<|channel|>commentary<|message|>rain<|end|><|start|>assistant"
    )
