"""Calls that a grammar holds: what can only follow is not drawn, and a stream has no chunk without a word."""

from __future__ import annotations

import json
from typing import Any

import pytest
from asgi import AppThread, Serve

from vllm.answers.answer import AnswerFormat

CITY = {
    "type": "object",
    "properties": {"a_city_of_the_world": {"enum": ["Oslo in Norway", "Rome in Italy"]}},
    "required": ["a_city_of_the_world"],
}
WEATHER = {"type": "function", "function": {"name": "weather_of_a_city", "parameters": CITY}}
NAMED = {"type": "function", "function": {"name": "weather_of_a_city"}}
CHOICES = {"required": "required", "named": NAMED}
USER = [{"role": "user", "content": "?"}]
THINKING = "{{ messages[0].content }}<think>"


DRAFTS = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 1, "prompt_lookup_max": 3}


@pytest.fixture(scope="module", params=[{}, {"speculative_config": DRAFTS}], ids=["alone", "drafts"])
def server(serve: Serve, request: pytest.FixtureRequest) -> AppThread:
    fields = {"max_model_len": 1024, **request.param}
    return serve(fields, chat_template="{{ messages[0].content }}", reasoning_parser="qwen3")


def num_steps(server: AppThread) -> int:
    text = server.request("GET", "/metrics").text
    found = [line for line in text.splitlines() if line.startswith("vllm:iteration_tokens_total_count")]
    return round(sum(float(line.split()[-1]) for line in found))


def asked(server: AppThread, url: str = "/v1/chat/completions", **body: Any) -> tuple[Any, int]:
    """The answer, or the data of its events, and the number of steps that it took."""
    before = num_steps(server)
    response = server.request("POST", url, json={"model": "tiny", **body})
    assert response.status_code == 200, response.text
    if not body.get("stream"):
        return response.json(), num_steps(server) - before
    events = [json.loads(line[6:]) for line in response.text.splitlines() if line.startswith("data: {")]
    return events, num_steps(server) - before


def body_of(choice: Any, **more: Any) -> dict[str, Any]:
    return {
        "messages": USER, "tools": [WEATHER], "tool_choice": choice, "parallel_tool_calls": False, "max_tokens": 300,
        "temperature": 1, "seed": 0, **more,
    }  # fmt: skip


@pytest.mark.parametrize("choice", CHOICES)
@pytest.mark.parametrize("parser", ["hermes", "qwen3_coder", "mistral", "pythonic"])
def test_a_forced_call_takes_few_steps(server, monkeypatch, choice, parser):
    form = AnswerFormat.of(None, parser, None)
    monkeypatch.setattr(server.state, "answer_format", lambda own=None: form)
    answer, steps = asked(server, **body_of(CHOICES[choice]))
    (call,) = answer["choices"][0]["message"]["tool_calls"]
    assert json.loads(call["function"]["arguments"])["a_city_of_the_world"] in ("Oslo in Norway", "Rome in Italy")
    count = answer["usage"]["completion_tokens"]
    # White space is free, and what begins like several values.
    assert count > 80 and steps < count / 3


@pytest.mark.parametrize("choice", CHOICES)
def test_so_it_does_after_a_thought(server, choice):
    body = body_of(CHOICES[choice], chat_template=THINKING, thinking_token_budget=10)
    answer, steps = asked(server, **body)
    message = answer["choices"][0]["message"]
    assert message["reasoning"] and len(message["tool_calls"]) == 1
    assert answer["usage"]["completion_tokens"] > 90 and steps < 60


@pytest.mark.parametrize("parser", ["hermes", "mistral", "pythonic"])
def test_a_forced_call_that_is_cut_leaves_no_text(server, monkeypatch, parser):
    form = AnswerFormat.of(None, parser, None)
    monkeypatch.setattr(server.state, "answer_format", lambda own=None: form)
    for max_tokens in range(1, 40, 6):
        answer, _ = asked(server, **body_of("required", max_tokens=max_tokens))
        (choice,) = answer["choices"]
        assert not choice["message"]["content"]
        # Only one function can be meant, be its name written or not.
        (call,) = choice["message"]["tool_calls"]
        assert call["function"]["name"] == "weather_of_a_city" and choice["finish_reason"] == "length"
        events, _ = asked(server, **body_of("required", max_tokens=max_tokens, stream=True))
        deltas = [choice["delta"] for each in events for choice in each["choices"]]
        assert not any(delta.get("content") for delta in deltas)
        parts = [part["function"] for delta in deltas for part in delta.get("tool_calls") or ()]
        assert [part["name"] for part in parts if part.get("name")] == ["weather_of_a_city"]
        assert "".join(part.get("arguments") or "" for part in parts) == call["function"]["arguments"]


def test_a_call_that_is_cut_before_its_name_is_unknown_among_several(server):
    other = {"type": "function", "function": {"name": "weather_of_a_country"}}
    answer, _ = asked(server, **{**body_of("required", max_tokens=1), "tools": [WEATHER, other]})
    message = answer["choices"][0]["message"]
    assert not message["content"] and not message.get("tool_calls")


def test_a_call_that_is_cut_before_its_name_over_the_other_doors(server):
    answer, _ = asked(server, "/v1/messages", **{**DOORS["/v1/messages"], "max_tokens": 1})
    assert [(part["name"], part["input"]) for part in answer["content"]] == [("weather_of_a_city", {})]
    assert answer["stop_reason"] == "max_tokens"
    answer, _ = asked(server, "/v1/responses", **{**DOORS["/v1/responses"], "max_output_tokens": 1})
    assert [(item["name"], item["arguments"]) for item in answer["output"]] == [("weather_of_a_city", "")]
    assert answer["status"] == "incomplete"


DOORS = {
    "/v1/chat/completions": body_of(NAMED),
    "/v1/responses": {
        "input": "?", "tools": [{"type": "function", **WEATHER["function"]}], "tool_choice": "required",
        "parallel_tool_calls": False, "max_output_tokens": 300, "temperature": 1, "seed": 0,
    },
    "/v1/messages": {
        "messages": USER, "tools": [{"name": "weather_of_a_city", "input_schema": CITY}], "max_tokens": 300,
        "tool_choice": {"type": "any", "disable_parallel_tool_use": True}, "temperature": 1, "seed": 0,
    },
}  # fmt: skip


@pytest.mark.parametrize("url", DOORS)
def test_nothing_is_sent_where_nothing_is_said(server, url):
    events, steps = asked(server, url, stream=True, **DOORS[url])
    for each in events:
        assert each.get("delta") != ""
        for choice in each.get("choices") or ():
            delta = choice["delta"]
            assert choice["finish_reason"] or any(delta.values())
            for call in delta.get("tool_calls") or ():
                assert call["function"].get("name") or call["function"]["arguments"]
    assert json.dumps(events).count("weather_of_a_city") >= 1
    assert steps < 40


def test_what_is_said_beside_the_text_is_sent(server):
    body = body_of(NAMED, stream=True)
    plain, _ = asked(server, **body)
    assert plain[0]["choices"][0]["delta"]["role"] == "assistant"
    assert plain[-1]["choices"][0]["finish_reason"] == "tool_calls"
    ids, _ = asked(server, **body, return_token_ids=True, stream_options={"include_usage": True})
    count = sum(len(choice.get("token_ids") or ()) for each in ids for choice in each["choices"])
    assert ids[-1]["usage"]["completion_tokens"] == count
    read, _ = asked(server, **body, logprobs=True)
    entries = [
        entry
        for each in read
        for choice in each["choices"]
        for entry in (choice["logprobs"] or {"content": ()})["content"]
    ]
    assert len(entries) == count
    options = {"include_usage": True, "continuous_usage_stats": True}
    counted, _ = asked(server, **body, stream_options=options)
    assert all(each["usage"] for each in counted)
