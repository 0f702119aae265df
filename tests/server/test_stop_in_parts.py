"""Stop strings look at an answer's content alone, as its readers see it: not at thoughts, not at calls."""

from __future__ import annotations

import json
from typing import Any

import pytest
from asgi import AppThread, Serve
from forced_tokens import FORCED

TEMPLATE = (
    "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}assistant:{{ '<think>' if inside else '' }}"
)
USER = [{"role": "user", "content": "?"}]
TOOL = {"type": "function", "function": {"name": "say", "parameters": {"type": "object", "properties": {}}}}
CALL = '<tool_call>{"name": "say", "arguments": {"text": "STOP"}}</tool_call>'
LONG = "x" * 40


@pytest.fixture(scope="module")
def server(serve: Serve) -> AppThread:
    return serve(FORCED, chat_template=TEMPLATE, reasoning_parser="qwen3", tool_call_parser="hermes")


def bodied(server: AppThread, text: str, stop: Any, **body: Any) -> dict[str, Any]:
    ids = server.engine.input_processor.tokenizer.encode(text, add_special_tokens=False)
    own = {"model": "tiny", "messages": USER, "max_tokens": len(ids), "temperature": 0, "stop": stop}
    return {**own, "vllm_xargs": {"forced": ids}, **body}


def whole(server: AppThread, text: str, stop: Any, **body: Any) -> dict[str, Any]:
    return server.post("/v1/chat/completions", **bodied(server, text, stop, **body))["choices"][0]


def streamed(server: AppThread, text: str, stop: Any, **body: Any) -> tuple[dict[str, str], list[dict[str, Any]]]:
    """The parts of the streamed message, and the choices of the chunks."""
    response = server.request("POST", "/v1/chat/completions", json=bodied(server, text, stop, stream=True, **body))
    lines = [line[6:] for line in response.text.splitlines() if line.startswith("data: ")]
    chunks = [choice for line in lines[:-1] for choice in json.loads(line)["choices"]]
    parts = {"reasoning": "", "content": "", "arguments": ""}
    for chunk in chunks:
        delta = chunk["delta"]
        for name in ("reasoning", "content"):
            parts[name] += delta.get(name) or ""
        for call in delta.get("tool_calls") or ():
            parts["arguments"] += call["function"].get("arguments") or ""
    return parts, chunks


@pytest.mark.parametrize(
    ("text", "stop", "reasoning", "content"),
    [
        ("<think>a STOP b</think>c STOP" + LONG, "STOP", "a STOP b", "c "),
        ("<think>a STOP b</think>c", ["STOP"], "a STOP b", "c"),
        ("<think>STOP</think>STOP" + LONG, ["no", "STOP"], "STOP", None),
        ("<think>a\nb</think>\n\nc\nd" + LONG, "c\n", "a\nb", "\n\n"),
        ("<think>a</think>b", "</think>", "a", "b"),
        ("<think>a ST</think>OP b", "STOP", "a ST", "OP b"),
        ("c STOP d" + LONG, "STOP", None, "c "),
        ("<think>only STOP thoughts", "STOP", "only STOP thoughts", None),
    ],
)
def test_thoughts_do_not_count(server, text, stop, reasoning, content):
    choice = whole(server, text, stop)
    message = choice["message"]
    assert (message["reasoning"], message["content"]) == (reasoning, content)
    is_stopped = text.endswith(LONG)
    assert choice["finish_reason"] == ("stop" if is_stopped else "length")
    assert (choice["stop_reason"] in (stop, stop[-1])) if is_stopped else choice["stop_reason"] is None
    parts, chunks = streamed(server, text, stop)
    assert (parts["reasoning"], parts["content"]) == (reasoning or "", content or "")
    last = chunks[-1]
    assert (last["finish_reason"], last["stop_reason"]) == (choice["finish_reason"], choice["stop_reason"])


def test_thoughts_that_the_prompt_begins(server):
    inside = {"chat_template_kwargs": {"inside": True}}
    message = whole(server, "a STOP b</think>c STOP" + LONG, "STOP", **inside)["message"]
    assert (message["reasoning"], message["content"]) == ("a STOP b", "c ")


def test_the_stop_string_may_be_shown(server):
    text = "<think>a STOP b</think>c STOP" + LONG
    message = whole(server, text, "STOP", include_stop_str_in_output=True)["message"]
    assert (message["reasoning"], message["content"]) == ("a STOP b", "c STOP")
    parts, _ = streamed(server, text, "STOP", include_stop_str_in_output=True)
    assert (parts["reasoning"], parts["content"]) == ("a STOP b", "c STOP")


@pytest.mark.parametrize("before", ["", "<think>STOP</think>"])
def test_calls_do_not_count(server, before):
    text = before + "I say" + CALL
    choice = whole(server, text, ["STOP", "text"], tools=[TOOL])
    message = choice["message"]
    assert (message["content"], choice["stop_reason"]) == ("I say", None)
    assert json.loads(message["tool_calls"][0]["function"]["arguments"]) == {"text": "STOP"}
    parts, chunks = streamed(server, text, "STOP", tools=[TOOL])
    assert parts["content"] == "I say" and json.loads(parts["arguments"]) == {"text": "STOP"}
    assert chunks[-1]["stop_reason"] is None


def test_what_follows_a_call_counts(server):
    text = f"{CALL} And STOP{LONG}"
    choice = whole(server, text, "STOP", tools=[TOOL])
    assert choice["message"]["content"] == "And " and len(choice["message"]["tool_calls"]) == 1
    assert choice["stop_reason"] == "STOP"
    parts, _ = streamed(server, text, "STOP", tools=[TOOL])
    assert parts["content"] == "And " and json.loads(parts["arguments"]) == {"text": "STOP"}


@pytest.mark.parametrize("include", [False, True])
def test_a_call_may_be_stopped_at_its_end(server, include):
    own = {"tools": [TOOL], "include_stop_str_in_output": include}
    choice = whole(server, CALL + LONG, "</tool_call>", **own)
    assert (choice["message"]["content"], choice["finish_reason"]) == (None, "tool_calls")
    parts, chunks = streamed(server, CALL + LONG, "</tool_call>", **own)
    assert json.loads(parts["arguments"]) == {"text": "STOP"} and chunks[-1]["stop_reason"] == "</tool_call>"


def test_white_space_that_only_parts_a_call_from_a_text(server):
    choice = whole(server, f"I say\n{CALL}", "\n", tools=[TOOL])
    assert (choice["message"]["content"], choice["stop_reason"]) == ("I say", None)
    assert len(choice["message"]["tool_calls"]) == 1
    for text in ("I say\nmore" + LONG, "I say\n"):
        choice = whole(server, text, "\n", tools=[TOOL])
        assert (choice["message"]["content"], choice["stop_reason"]) == ("I say", "\n")
        assert streamed(server, text, "\n", tools=[TOOL])[0]["content"] == "I say"


def test_a_forced_call_is_no_content(server):
    forced = {"tools": [TOOL], "tool_choice": "required", "max_tokens": 120}
    choice = whole(server, "<think>x</think>", ['"', "{"], **forced)
    assert choice["message"]["tool_calls"][0]["function"]["name"] == "say" and choice["stop_reason"] is None


def test_each_choice_has_its_own(server):
    text = "<think>STOP</think>b STOP" + LONG
    body = bodied(server, text, "STOP", n=3, temperature=1, seed=1)
    choices = server.post("/v1/chat/completions", **body)["choices"]
    assert [each["message"]["content"] for each in choices] == ["b "] * 3
    _, chunks = streamed(server, text, "STOP", n=3, temperature=1, seed=1)
    assert {chunk["index"] for chunk in chunks if chunk["stop_reason"] == "STOP"} == {0, 1, 2}


def test_min_tokens_count_all_tokens(server):
    text = "<think>a</think>b STOP c STOP" + LONG
    first = len(
        server.engine.input_processor.tokenizer.encode(text[: text.index("STOP") + 4], add_special_tokens=False)
    )
    assert whole(server, text, "STOP", min_tokens=first)["message"]["content"] == "b STOP c "
    assert whole(server, text, "STOP", min_tokens=first - 1)["message"]["content"] == "b "


def test_other_doors(server):
    text = "<think>a STOP b</think>c STOP" + LONG
    body = bodied(server, text, "STOP")
    del body["stop"]
    answer = server.request("POST", "/v1/messages", json={**body, "stop_sequences": ["STOP"]}).json()
    assert [(each["type"], each.get("thinking") or each.get("text")) for each in answer["content"]] == [
        ("thinking", "a STOP b"),
        ("text", "c "),
    ]
    assert (answer["stop_reason"], answer["stop_sequence"]) == ("stop_sequence", "STOP")


def test_without_a_parser_all_is_content(server):
    body = bodied(server, "<think>a STOP b", "STOP", prompt="x")
    del body["messages"]
    (choice,) = server.post("/v1/completions", **body)["choices"]
    assert (choice["text"], choice["stop_reason"]) == ("<think>a ", "STOP")
