"""Reasoning and calls of forced texts in the shapes of /v1/responses and /v1/messages; forced calls are valid there."""

from __future__ import annotations

import json
from typing import Any

import pytest
from asgi import AppThread, Serve
from byte_tokenizer import byte_ids
from forced_tokens import FORCED

TEMPLATE = (
    "{% if tools %}{{ tools | length }} <tool_call>{% endif %}"
    "{% for m in messages %}{{ m.role }}: {{ m.content }}"
    "{% if m.reasoning_content %}<think>{{ m.reasoning_content }}</think>{% endif %}"
    "{% for c in m.tool_calls or [] %}[{{ c.function.name }} {{ c.function.arguments.city }}]{% endfor %}"
    "{{ m.tool_call_id }}\n{% endfor %}"
)
CITY = {"type": "object", "properties": {"city": {"enum": ["Oslo", "Rome"]}}, "required": ["city"]}
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo"}}\n</tool_call>'
TEXT = f"<think>Hm.</think>Let me see.\n{CALL}"
RESPONSES, MESSAGES = "/v1/responses", "/v1/messages"
BODIES: dict[str, dict[str, Any]] = {
    RESPONSES: {
        "input": "?",
        "tools": [{"type": "function", "name": "weather", "parameters": CITY}],
        "max_output_tokens": 200,
    },
    MESSAGES: {
        "messages": [{"role": "user", "content": "?"}],
        "tools": [{"name": "weather", "input_schema": CITY}],
        "max_tokens": 200,
    },
}


@pytest.fixture(scope="module")
def server(serve: Serve) -> AppThread:
    return serve(FORCED, chat_template=TEMPLATE)


def forced(path: str, text: str, **fields: Any) -> dict[str, Any]:
    """A body whose answer is the text, to its stop string."""
    stop = {RESPONSES: "stop", MESSAGES: "stop_sequences"}[path]
    ends = {stop: ["|"], "vllm_xargs": {"forced": byte_ids(text + "|")}, "temperature": 0}
    return {**BODIES[path], **ends, **fields}


def events_of(server: AppThread, path: str, **body: Any) -> list[dict[str, Any]]:
    response = server.request("POST", path, json={"model": "tiny", "stream": True, **body})
    assert response.status_code == 200, response.text
    return [json.loads(line[6:]) for line in response.text.splitlines() if line.startswith("data: ")]


def without_ids(items: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{name: value for name, value in item.items() if name not in ("id", "call_id")} for item in items]


def test_items_of_a_response(server):
    response = server.post(RESPONSES, **forced(RESPONSES, TEXT, include=["message.output_text.logprobs"]))
    reasoning, message, call = response["output"]
    assert reasoning["content"] == [{"type": "reasoning_text", "text": "Hm."}]
    (part,) = message["content"]
    assert part["text"] == "Let me see."
    assert (call["name"], json.loads(call["arguments"])) == ("weather", {"city": "Oslo"})
    assert {item["status"] for item in response["output"]} == {response["status"]} == {"completed"}
    # The text's own, and neither those of what it thought before nor those of the call.
    assert "".join(each["token"] for each in part["logprobs"]) == "Let me see."
    assert response["usage"]["output_tokens_details"] == {"reasoning_tokens": 3}


def test_logprobs_are_of_the_text_whatever_stands_around_it(server):
    text = TEXT.replace("Hm.", "Oslo").replace("Let me see.", "Oslo")
    body = forced(RESPONSES, text, include=["message.output_text.logprobs"])
    tools = [{"type": "function", "function": {"name": "weather", "parameters": CITY}}]
    chat = {"messages": [{"role": "user", "content": "?"}], "tools": tools, "logprobs": True, "temperature": 0}
    chat |= {"vllm_xargs": body["vllm_xargs"], "max_tokens": len(text)}
    entries = server.post("/v1/chat/completions", **chat)["choices"][0]["logprobs"]["content"]
    start = text.index("</think>") + len("</think>")
    expected = [each["logprob"] for each in entries[start : start + 4]]
    for response in (server.post(RESPONSES, **body), events_of(server, RESPONSES, **body)[-1]["response"]):
        (part,) = response["output"][1]["content"]
        assert part["text"] == "Oslo"
        assert [each["logprob"] for each in part["logprobs"][:4]] == pytest.approx(expected, abs=1e-5)
        assert "".join(each["token"] for each in part["logprobs"]).strip() == "Oslo"


def test_events_of_a_response(server):
    body = forced(RESPONSES, TEXT, include=["message.output_text.logprobs"])
    events = events_of(server, RESPONSES, **body)
    whole = server.post(RESPONSES, **body)
    last = events[-1]["response"]
    assert events[-1]["type"] == "response.completed"
    for mine, other in zip(last["output"], whole["output"], strict=True):
        if mine["type"] == "message":
            assert mine["content"][0]["text"] == other["content"][0]["text"]
        else:
            assert without_ids([mine]) == without_ids([other])
    kinds = [event["type"].removeprefix("response.") for event in events]
    once = [kind for index, kind in enumerate(kinds) if index == 0 or kind != kinds[index - 1]]
    assert once == [
        "created", "in_progress",
        "output_item.added", "content_part.added", "reasoning_text.delta", "reasoning_text.done", "content_part.done",
        "output_item.done",
        "output_item.added", "content_part.added", "output_text.delta", "output_text.done", "content_part.done",
        "output_item.done",
        "output_item.added", "function_call_arguments.delta", "function_call_arguments.done", "output_item.done",
        "completed",
    ]  # fmt: skip
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    arguments = "".join(event["delta"] for event in events if "arguments.delta" in event["type"])
    assert arguments == last["output"][2]["arguments"]
    done = [event["item"] for event in events if event["type"] == "response.output_item.done"]
    assert done == last["output"]
    shown = "".join(each["token"] for each in last["output"][1]["content"][0]["logprobs"])
    assert shown.startswith("Let me see.") and "Hm" not in shown


def test_blocks_of_a_message(server):
    answer = server.post(MESSAGES, **forced(MESSAGES, TEXT))
    thinking, text, call = answer["content"]
    assert thinking == {"type": "thinking", "thinking": "Hm.", "signature": ""}
    assert text == {"type": "text", "text": "Let me see."}
    assert (call["type"], call["name"], call["input"]) == ("tool_use", "weather", {"city": "Oslo"})
    assert answer["stop_reason"] == "tool_use"
    events = events_of(server, MESSAGES, **forced(MESSAGES, TEXT))
    starts = [event["content_block"]["type"] for event in events if event["type"] == "content_block_start"]
    assert starts == ["thinking", "text", "tool_use"]
    pieces = [event["delta"].get("partial_json", "") for event in events if event["type"] == "content_block_delta"]
    assert json.loads("".join(pieces)) == call["input"]
    assert events[-2]["delta"]["stop_reason"] == "tool_use"
    assert [event["index"] for event in events if event["type"] == "content_block_stop"] == [0, 1, 2]


def test_a_call_that_is_cut_is_not_lost(server):
    cut = TEXT[: TEXT.index("slo")]
    response = server.post(RESPONSES, **forced(RESPONSES, TEXT, max_output_tokens=len(cut)))
    assert (response["status"], response["output"][-1]["status"]) == ("incomplete", "incomplete")
    assert response["output"][-1]["arguments"] == '{"city": "O'
    answer = server.post(MESSAGES, **forced(MESSAGES, TEXT, max_tokens=len(cut)))
    assert answer["stop_reason"] == "max_tokens"
    assert answer["content"][-1]["input"] == {"INVALID_JSON": '{"city": "O'}


@pytest.mark.parametrize("seed", range(2))
def test_forced_calls_are_valid(server, seed):
    # Where the template shows none, calls need not wait for the end of a thought.
    own = {"seed": seed, "temperature": 1, "chat_template": "<tool_call>{{ messages[0].content }}"}
    for choice in ("required", {"type": "function", "name": "weather"}):
        (call,) = server.post(RESPONSES, **BODIES[RESPONSES], **own, tool_choice=choice, parallel_tool_calls=False)[
            "output"
        ]
        assert json.loads(call["arguments"])["city"] in ("Oslo", "Rome")
    for choice in ({"type": "any", "disable_parallel_tool_use": True}, {"type": "tool", "name": "weather"}):
        (block,) = server.post(MESSAGES, **BODIES[MESSAGES], **own, tool_choice=choice)["content"]
        assert block["input"]["city"] in ("Oslo", "Rome")


def test_no_tool_may_be_called(server):
    response = server.post(RESPONSES, **forced(RESPONSES, CALL, tool_choice="none"))
    assert response["output"][0]["content"][0]["text"] == CALL
    answer = server.post(MESSAGES, **forced(MESSAGES, CALL, tool_choice={"type": "none"}))
    assert answer["content"] == [{"type": "text", "text": CALL}]


def test_history_reaches_the_template(server):
    """Thoughts, words, calls and their results make the same prompt through all three doors."""
    function = {"name": "weather", "arguments": '{"city": "Oslo"}'}
    said = {"reasoning_content": "hm", "tool_calls": [{"id": "c1", "type": "function", "function": function}]}
    history = [
        {"role": "user", "content": "?"},
        {"role": "assistant", "content": "Well", **said},
        {"role": "tool", "tool_call_id": "c1", "content": "cold"},
    ]
    want = server.post("/v1/chat/completions/render", messages=history)["token_ids"]
    items = [
        {"role": "user", "content": "?"},
        {"type": "reasoning", "id": "r", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "Well"}]},
        {"type": "function_call", "call_id": "c1", **function},
        {"type": "function_call_output", "call_id": "c1", "output": "cold"},
    ]
    response = server.post(RESPONSES, input=items, max_output_tokens=1, return_token_ids=True)
    assert response["prompt_token_ids"] == want
    blocks = [
        {"type": "thinking", "thinking": "hm", "signature": ""},
        {"type": "text", "text": "Well"},
        {"type": "tool_use", "id": "c1", "name": "weather", "input": {"city": "Oslo"}},
    ]
    result = {"type": "tool_result", "tool_use_id": "c1", "content": [{"type": "text", "text": "cold"}]}
    messages = [
        {"role": "user", "content": "?"},
        {"role": "assistant", "content": blocks},
        {"role": "user", "content": [result]},
    ]
    answer = server.post(MESSAGES, messages=messages, max_tokens=1, return_token_ids=True)
    assert answer["prompt_token_ids"] == want


def test_a_response_follows_a_call(server):
    """As agents go on: the call's result alone, with the id of the response that has the call."""
    first = server.post(RESPONSES, **forced(RESPONSES, TEXT))
    output = {"type": "function_call_output", "call_id": first["output"][2]["call_id"], "output": "cold"}
    second = server.post(
        RESPONSES, input=[output], previous_response_id=first["id"], max_output_tokens=1, return_token_ids=True
    )
    prompt = server.post("/detokenize", tokens=second["prompt_token_ids"])["prompt"]
    assert prompt == f"user: ?\nassistant: Let me see.<think>Hm.</think>[weather Oslo]\ntool: cold{output['call_id']}\n"


def test_budgets_of_thinking_hold_where_nothing_is_thought(server):
    server.state.chat_template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    try:
        thinking = {"type": "enabled", "budget_tokens": 1024}
        body = forced(MESSAGES, "Yes", tools=[], max_tokens=5, thinking=thinking)
        assert server.post(MESSAGES, **body)["content"] == [{"type": "text", "text": "Yes"}]
    finally:
        server.state.chat_template = TEMPLATE
