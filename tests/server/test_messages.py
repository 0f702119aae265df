"""POST /v1/messages: answers, events and readings equal chat's, in Anthropic's shape."""

from __future__ import annotations

import json
from dataclasses import replace
from datetime import datetime

import pytest
from asgi import AppThread, Serve

from vllm.server.protocol.messages import MessageEvent, MessageObject

TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
PATH = "/v1/messages"
USER = [{"role": "user", "content": "hello"}]
GREEDY = {"temperature": 0, "ignore_eos": True, "max_tokens": 4}
SIZES = {"max_num_seqs": 4, "max_model_len": 128}


@pytest.fixture(scope="module")
def server(serve: Serve) -> AppThread:
    app = serve(SIZES, chat_template=TEMPLATE, api_key=["k"])
    app._client.headers["x-api-key"] = "k"
    return app


def chat(server, messages=USER, **fields):
    return server.post("/v1/chat/completions", messages=messages, **{**GREEDY, **fields})


def message(server, messages=USER, **fields):
    answer = server.post(PATH, messages=messages, **{**GREEDY, **fields})
    MessageObject.model_validate(answer)
    return answer


def text_of(answer):
    (block,) = answer["content"]
    return block["text"]


def content_of(answer):
    return answer["choices"][0]["message"]["content"]


def events_of(server, **fields):
    body = {"model": "tiny", "messages": USER, **GREEDY, "stream": True, **fields}
    answer = server.request("POST", PATH, json=body)
    assert answer.headers["content-type"] == "text/event-stream; charset=utf-8"
    events = []
    for event in answer.text.removesuffix("\n\n").split("\n\n"):
        name, data = event.split("\n")
        events.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {events[-1]['type']}"
        MessageEvent.model_validate(events[-1])
    return events


def error_of(server, status=400, headers=None, path=PATH, **fields):
    body = {"model": "tiny", "messages": USER, **GREEDY, **fields}
    answer = server.request("POST", path, json=body, headers=headers)
    assert answer.status_code == status, answer.text
    assert answer.json()["type"] == "error"
    return answer.json()["error"]


def test_blocks_are_messages(server):
    messages = [
        {"role": "user", "content": [{"type": "text", "text": "b", "cache_control": {"type": "ephemeral"}}]},
        {"role": "assistant", "content": [{"type": "text", "text": "c"}, {"type": "redacted_thinking", "data": "x"}]},
        {"role": "user", "content": "d"},
    ]
    own = [{"type": "text", "text": "a"}, {"type": "text", "text": "e"}]
    want = chat(
        server,
        [
            {"role": "system", "content": "a\ne"},
            {"role": "user", "content": "b"},
            {"role": "assistant", "content": "c"},
            {"role": "user", "content": "d"},
        ],
    )
    assert text_of(message(server, messages, system=own)) == content_of(want)


def test_the_answer_goes_on_where_its_message_ends(server):
    begun = [*USER, {"role": "assistant", "content": "So"}]
    want = chat(server, begun, add_generation_prompt=False, continue_final_message=True)
    assert text_of(message(server, begun)) == content_of(want)


def test_the_context_may_end_before_max_tokens(server):
    answer = message(server, max_tokens=100_000)
    assert answer["stop_reason"] == "model_context_window_exceeded"
    assert sum(answer["usage"].values()) == SIZES["max_model_len"]


def test_readings_equal_those_of_chat(server):
    own = {
        "logprobs": True, "top_logprobs": 2, "logprob_token_ids": [70, 71], "labels": ["a"], "logits_indices": [9],
    }  # fmt: skip
    want = chat(server, **own)
    choice = want["choices"][0]
    answer = message(server, **own)
    last = events_of(server, **own)[-2]
    for found in (answer, last):
        assert found["logprobs"] == choice["logprobs"]
        assert found["labels"] == want["labels"]
        for name in ("readings", "logits_values", "logits_values_per_token"):
            assert found[name] == choice[name]


def test_events_in_order(server):
    events = events_of(server)
    kinds = [event["type"] for event in events]
    deltas = kinds.count("content_block_delta")
    assert kinds == [
        "message_start",
        "ping",
        "content_block_start",
        *["content_block_delta"] * deltas,
        "content_block_stop",
        "message_delta",
        "message_stop",
    ]
    whole = message(server)
    assert "".join(event["delta"]["text"] for event in events if "text" in event.get("delta", ())) == text_of(whole)
    start, end = events[0]["message"], events[-2]
    assert (start["content"], start["stop_reason"]) == ([], None)
    assert start["usage"]["input_tokens"] == whole["usage"]["input_tokens"]
    assert end["delta"] == {"stop_reason": "max_tokens", "stop_sequence": None}
    assert end["usage"] == whole["usage"]


def test_count_tokens(server):
    counted = server.post(f"{PATH}/count_tokens", messages=USER, system="a")
    usage = message(server, system="a")["usage"]
    assert counted == {"input_tokens": usage["input_tokens"] + usage["cache_read_input_tokens"]}


@pytest.mark.parametrize(
    ("fields", "param", "says"),
    [
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "messages", "messages[0].content[0]"),
        ({"messages": [{"role": "user", "content": [{"type": "document"}]}]}, "messages", "'document'"),
        ({"messages": [{"role": "critic", "content": "a"}]}, "messages", "messages[0].role"),
        ({"messages": [{"role": "system", "content": "a"}]}, "messages", "the user's"),
        ({"messages": [{"role": "user", "content": "x" * 1000}]}, "messages", "128"),
        ({"messages": []}, "messages", "messages"),
        ({"max_tokens": 0}, "max_tokens", "max_tokens"),
        ({"stop": ["a"]}, "stop", "stop_sequences"),
        ({"n": 2}, "n", "one answer"),
        ({"system": [{"type": "image"}]}, "system", "system[0]"),
        ({"tools": [{"type": "web_search_20250305", "name": "w"}]}, "tools", "web_search"),
        ({"tools": [{"name": "f"}]}, "tools", "input_schema"),
        ({"tool_choice": {"type": "some"}}, "tool_choice.type", "any"),
        ({"thinking": {"type": "enabled"}}, "thinking.budget_tokens", "integer"),
        ({"thinking": {"type": "much"}}, "thinking.type", "adaptive"),
        ({"output_config": {"colour": 1}}, "output_config.colour", "known"),
        ({"output_config": {"format": {"type": "json_object"}}}, "output_config.format", "json_schema"),
        ({"mcp_servers": [{}]}, "mcp_servers", "no tools"),
        ({"container": "x"}, "container", "nothing is run"),
        ({"stop_sequences": [7]}, "stop_sequences", "stop_sequences"),
        ({"colour": 1}, "colour", "unknown field"),
        ({"thread": {"type": "create"}}, "thread", "send all of its messages"),
        ({"fallbacks": [{"model": "other"}]}, "fallbacks", "no other model"),
        ({"reasoning_effort": "low"}, "reasoning_effort", "output_config.effort"),
    ],
)
def test_what_is_not_done_is_refused_by_name(server, fields, param, says):
    error = error_of(server, **fields)
    assert (error["type"], error["param"]) == ("invalid_request_error", param)
    assert says in error["message"]


@pytest.mark.parametrize("thread", [{"type": "create"}, {"type": "continue", "previous_message_id": "msg_1"}])
def test_clients_learn_that_no_conversation_is_kept(server, monkeypatch, thread):
    """Also where unknown fields pass: who believes that it is kept sends neither tools nor earlier messages again."""
    told = {"error_code": "thread_unsupported_request", "unsupported": ["thread"]}
    for ignored in (False, True):
        monkeypatch.setattr(server.state, "args", replace(server.state.args, ignore_unknown_fields=ignored))
        assert error_of(server, thread=thread)["details"] == told
    assert "details" not in error_of(server, fallbacks=[{}])


def test_models_as_its_clients_read_them(server, monkeypatch):
    names = ["tiny", "b", "c"]
    monkeypatch.setattr(server.state, "args", replace(server.state.args, served_model_name=names))

    def listed(**query):
        answer = server.request("GET", "/v1/models", params=query)
        assert answer.status_code == 200, answer.text
        body = answer.json()
        found = [each["id"] for each in body["data"]]
        assert (body["first_id"], body["last_id"]) == ((found[0], found[-1]) if found else (None, None))
        return found, body["has_more"]

    assert listed() == (names, False)
    assert listed(limit=2) == (["tiny", "b"], True)
    assert listed(limit=2, after_id="b") == (["c"], False)
    assert listed(limit=1, before_id="c") == (["b"], True)
    assert listed(after_id="c") == ([], False)
    card = server.request("GET", "/v1/models/b").json()
    assert (card["type"], card["display_name"], card["lifecycle"]) == ("model", "b", "active")
    assert datetime.fromisoformat(card["created_at"].replace("Z", "+00:00")).timestamp() == card["created"]
    assert card["max_input_tokens"] == card["max_tokens"] == SIZES["max_model_len"]
    for query in ({"limit": "0"}, {"limit": "x"}, {"limit": "9999"}, {"after_id": "d"}, {"before_id": "d"}):
        answer = server.request("GET", "/v1/models", params=query)
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, next(iter(query)))


def test_models_as_llama_cpps_clients_read_them(server):
    body = server.request("GET", "/v1/models").json()
    (card,) = body["data"]
    size = SIZES["max_model_len"]
    assert card["meta"]["n_ctx"] == size <= card["meta"]["n_ctx_train"]
    assert card["meta"]["n_vocab"] == server.state.engine.model_config.vocab_size and card["meta"]["n_embd"] > 0
    assert body["models"] == [{"name": "tiny", "model": "tiny", "type": "model", "capabilities": ["completion"]}]


@pytest.mark.parametrize("path", ["/v1/models/other", "/v1/none"])
def test_its_clients_read_errors_of_any_path(server, path):
    answer = server.request("GET", path, headers={"anthropic-version": "2023-06-01"})
    body = answer.json()
    assert (answer.status_code, body["type"], body["error"]["type"]) == (404, "error", "not_found_error")
    assert body["error"]["message"] and answer.headers["request-id"]
    assert "type" not in server.request("GET", path).json()


def test_errors_have_anthropics_shape(server):
    assert error_of(server, 404, model="other")["type"] == "not_found_error"
    assert error_of(server, 401, headers={"x-api-key": "wrong"})["type"] == "authentication_error"
    assert error_of(server, 401, headers={"x-api-key": ""})["type"] == "authentication_error"
    assert error_of(server, path=f"{PATH}/count_tokens", messages=[])["type"] == "invalid_request_error"
    answer = server.request("GET", PATH)
    assert (answer.status_code, answer.json()["type"]) == (405, "error")
    assert answer.headers["request-id"] == answer.headers["x-request-id"]
