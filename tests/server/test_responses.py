"""POST /v1/responses: answers, events and readings equal chat's; conversations that the server keeps."""

from __future__ import annotations

import json
import time

import pytest
from asgi import AppThread, Serve

from vllm.server.protocol.responses import ResponseEvent, ResponseObject

TEMPLATE = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}<assistant>"
GREEDY = {"temperature": 0, "ignore_eos": True, "max_output_tokens": 4}
PATH = "/v1/responses"
SIZES = {"max_num_seqs": 4, "max_model_len": 512}


@pytest.fixture(scope="module")
def server(serve: Serve) -> AppThread:
    return serve({"max_num_seqs": 4, "max_model_len": 512}, chat_template=TEMPLATE)


def chat(server, messages, **fields):
    own = {"temperature": 0, "ignore_eos": True, "max_tokens": 4}
    return server.post("/v1/chat/completions", messages=messages, **{**own, **fields})


def respond(server, given="hello", **fields):
    response = server.post(PATH, input=given, **{**GREEDY, **fields})
    ResponseObject.model_validate(response)
    return response


def text_of(response):
    return "".join(part["text"] for item in response["output"] for part in item.get("content", ()))


def events_of(server, **fields):
    """(name, data) of each event of a stream."""
    body = {"model": "tiny", "input": "hello", **GREEDY, "stream": True, **fields}
    answer = server.request("POST", PATH, json=body)
    assert answer.headers["content-type"] == "text/event-stream; charset=utf-8"
    events = []
    for event in answer.text.removesuffix("\n\n").split("\n\n"):
        name, data = event.split("\n")
        events.append((name.removeprefix("event: "), json.loads(data.removeprefix("data: "))))
        ResponseEvent.model_validate(events[-1][1])
    return events


def error_of(server, status=400, **fields):
    content = json.dumps({"model": "tiny", "input": "hello", **GREEDY, **fields})
    answer = server.request("POST", PATH, content=content, headers={"Content-Type": "application/json"})
    assert answer.status_code == status, answer.text
    return answer.json()["error"]


def test_the_item_of_a_text(server):
    response = respond(server)
    (item,) = response["output"]
    assert (item["type"], item["role"]) == ("message", "assistant")
    assert response["completed_at"] is None or response["completed_at"] >= response["created_at"]
    assert response["usage"]["output_tokens_details"] == {"reasoning_tokens": 0}


def test_items_are_messages(server):
    items = [
        {"role": "developer", "content": "b"},
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "c"}]},
        {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": "t"}]},
        {"type": "message", "id": "m", "role": "assistant", "content": [{"type": "output_text", "text": "d"}]},
        {"role": "user", "content": "e"},
    ]
    want = chat(
        server,
        [
            {"role": "system", "content": "a\n\nb"},
            {"role": "user", "content": "c"},
            {"role": "assistant", "content": "d"},
            {"role": "user", "content": "e"},
        ],
    )
    assert text_of(respond(server, items, instructions="a")) == want["choices"][0]["message"]["content"]


@pytest.mark.parametrize(
    ("item", "says"),
    [
        ({"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}, "reads text only"),
        ({"role": "user", "content": [{"type": "input_file", "file_id": "x"}]}, "no files"),
        ({"role": "user", "content": [{"type": "input_audio", "input_audio": {}}]}, "no audio"),
        ({"type": "computer_call", "id": "x"}, "'computer_call'"),
        ({"type": "function_call", "name": "f", "arguments": "{}"}, "input[0].call_id"),
        ({"type": "item_reference", "id": "nothing"}, "no item that is kept"),
        ({"role": "critic", "content": "x"}, "input[0].role"),
        (7, "must be an object"),
    ],
)
def test_items_that_no_text_model_takes_are_refused_by_name(server, item, says):
    error = error_of(server, input=[item])
    assert error["param"].partition("[")[0] == "input"
    assert says in error["message"] and "input[0]" in error["message"]


@pytest.mark.parametrize(
    ("field", "value", "param"),
    [
        ("background", True, "background"),
        ("prompt", {"id": "p"}, "prompt"),
        ("tools", [{"type": "web_search"}], "tools"),
        ("tools", [{"type": "custom", "name": "c"}], "tools"),
        ("tool_choice", {"type": "mcp", "server_label": "x"}, "tool_choice"),
        ("include", ["nothing"], "include"),
        ("max_output_tokens", -1, "max_output_tokens"),
        ("max_output_tokens", 10_000, "max_output_tokens"),
        ("top_logprobs", 30_000, "top_logprobs"),
        ("max_tokens", 3, "max_tokens"),
        ("n", 2, "n"),
        ("truncation", "left", "truncation"),
        ("text", {"format": {"type": "json_schema", "name": "x"}}, "text.format"),
        ("text", {"verbosity": 3}, "text.verbosity"),
        ("verbosity", "low", "verbosity"),
        ("reasoning_effort", "low", "reasoning_effort"),
        ("text", {"colour": 1}, "text.colour"),
        ("reasoning", {"effort": 3}, "reasoning.effort"),
        ("input", [], "input"),
        ("metadata", {"a": "\ud800"}, "metadata"),
        ("input", [{"type": "reasoning", "summary": [{"type": "summary_text", "text": "\ud800"}]}], "input"),
        ("conversation", {"id": 3}, "conversation"),
        ("web_search_options", {}, "web_search_options"),
    ],
)
def test_what_is_not_done_is_refused_by_name(server, field, value, param):
    assert error_of(server, **{field: value})["param"] == param


def test_what_to_do_instead(server):
    custom, run_here = ({"type": kind, "name": "c"} for kind in ("custom", "code_interpreter"))
    for name, value in (("tools", [custom]), ("tool_choice", custom)):
        said = error_of(server, **{name: value})["message"]
        assert "give a function" in said and "runs no tools" not in said
    assert "runs no tools" in error_of(server, tools=[run_here])["message"]
    assert "/v1/chat/completions or /v1/messages takes it" in error_of(server, messages=[{}])["message"]
    answer = server.request("POST", "/v1/responses/compact", json={"model": "tiny", "input": "a"})
    assert answer.status_code == 404 and "truncation=auto" in answer.json()["error"]["message"]


def test_a_response_repeats_its_request(server):
    response = respond(server, store=False, metadata={"topic": "demo"}, parallel_tool_calls=False)
    assert response["metadata"] == {"topic": "demo"}
    assert response["store"] is response["parallel_tool_calls"] is False


def test_readings_equal_those_of_chat(server):
    """Readings of chosen ids, top-k and labels, whole and streamed."""
    own = {"top_logprobs": 2, "logprob_token_ids": [70, 71], "labels": ["a"], "logits_indices": [9]}
    want = chat(server, [{"role": "user", "content": "hello"}], logprobs=True, **own)
    choice = want["choices"][0]
    response = respond(server, include=["message.output_text.logprobs"], return_token_ids=True, **own)
    assert response["output"][0]["content"][0]["logprobs"] == choice["logprobs"]["content"]
    for name in ("readings", "logits_values_per_token", "logits_values"):
        assert response[name] == choice[name]
    assert response["labels"] == want["labels"]
    assert len(response["token_ids"]) == 4 and response["prompt_token_ids"]
    events = events_of(server, **own)
    streamed = events[-1][1]["response"]
    for name in ("readings", "logits_values_per_token", "logits_values", "labels"):
        assert streamed[name] == response[name]
    assert streamed["output"][0]["content"] == response["output"][0]["content"]
    pieces = [data["logprobs"] for name, data in events if name == "response.output_text.delta"]
    assert [each for piece in pieces for each in piece] == choice["logprobs"]["content"]


def test_no_logprobs_unless_asked(server):
    assert respond(server)["output"][0]["content"][0]["logprobs"] == []
    assert respond(server, logprob_token_ids=[70])["output"][0]["content"][0]["logprobs"]


def test_events_in_order(server):
    events = events_of(server)
    names = [name for name, _ in events]
    deltas = names.count("response.output_text.delta")
    assert names == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
        *["response.output_text.delta"] * deltas,
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
        "response.incomplete",
    ]
    assert deltas > 1
    assert [data["sequence_number"] for _, data in events] == list(range(len(events)))
    assert all(name == data["type"] for name, data in events)
    by_name = dict(events)
    whole = respond(server)
    text = "".join(data["delta"] for name, data in events if name == "response.output_text.delta")
    assert text == text_of(whole) == by_name["response.output_text.done"]["text"]
    assert by_name["response.created"]["response"]["output"] == []
    assert by_name["response.output_item.added"]["item"]["content"] == []
    assert by_name["response.content_part.added"]["part"]["text"] == ""
    last = by_name["response.incomplete"]["response"]
    assert last["usage"] == whole["usage"] and set(last) == set(whole)
    assert last["output"] == [by_name["response.output_item.done"]["item"]]


def test_a_form_is_repeated(server):
    form = {"format": {"type": "json_schema", "name": "x", "schema": {"type": "object"}, "strict": True}}
    assert respond(server, text=form)["text"] == form


def test_what_a_response_follows(server):
    """The model gets the earlier turns, but not their instructions."""
    first = respond(server, "one", instructions="i")
    second = respond(server, "two", previous_response_id=first["id"])
    want = chat(
        server,
        [
            {"role": "user", "content": "one"},
            {"role": "assistant", "content": text_of(first)},
            {"role": "user", "content": "two"},
        ],
    )
    assert text_of(second) == want["choices"][0]["message"]["content"]
    assert second["usage"]["input_tokens"] == want["usage"]["prompt_tokens"]
    items = server.request("GET", f"{PATH}/{second['id']}/input_items", params={"order": "asc"}).json()
    assert [item["role"] for item in items["data"]] == ["user", "assistant", "user"]
    assert items["data"][1] == first["output"][0]
    reference = {"type": "item_reference", "id": first["output"][0]["id"]}
    referred = [{"role": "user", "content": "one"}, reference, {"role": "user", "content": "two"}]
    assert text_of(respond(server, referred)) == text_of(second)


def test_kept_responses(server):
    response = respond(server)
    path = f"{PATH}/{response['id']}"
    assert server.request("GET", path).json() == response
    assert server.request("GET", f"{path}?stream=true").json()["error"]["param"] == "stream"
    assert "is incomplete" in server.request("POST", f"{path}/cancel").json()["error"]["message"]
    for query, param in (("limit=0", "limit"), ("order=up", "order"), ("after=x", "after")):
        assert server.request("GET", f"{path}/input_items?{query}").json()["error"]["param"] == param
    assert server.request("DELETE", path).json() == {"id": response["id"], "object": "response", "deleted": True}
    for method, place in (("GET", path), ("DELETE", path), ("GET", f"{path}/input_items"), ("POST", f"{path}/cancel")):
        answer = server.request(method, place)
        assert (answer.status_code, answer.json()["error"]["code"]) == (404, "response_not_found")
    error = error_of(server, 404, previous_response_id=response["id"])
    assert (error["param"], error["code"]) == ("previous_response_id", "response_not_found")
    unkept = respond(server, store=False)
    assert server.request("GET", f"{PATH}/{unkept['id']}").status_code == 404


def test_conversations(server):
    body = {"items": [{"role": "user", "content": "one"}], "metadata": {"a": "b"}}
    conversation = server.request("POST", "/v1/conversations", json=body).json()
    assert (conversation["object"], conversation["metadata"]) == ("conversation", {"a": "b"})
    path = f"/v1/conversations/{conversation['id']}"
    response = respond(server, "two", conversation=conversation["id"])
    assert response["conversation"] == {"id": conversation["id"]}
    want = chat(server, [{"role": "user", "content": "one"}, {"role": "user", "content": "two"}])
    assert text_of(response) == want["choices"][0]["message"]["content"]
    items = server.request("GET", f"{path}/items?order=asc&limit=2").json()
    assert [each["content"][0]["text"] for each in items["data"]] == ["one", "two"] and items["has_more"]
    rest = server.request("GET", f"{path}/items", params={"order": "asc", "after": items["last_id"]}).json()
    assert rest["data"] == response["output"] and not rest["has_more"]
    gone = items["first_id"]
    assert server.request("DELETE", f"{path}/items/{gone}").json() == conversation
    assert server.request("GET", f"{path}/items/{gone}").status_code == 404
    added = server.request("POST", f"{path}/items", json={"items": [{"role": "user", "content": "x"}]}).json()
    assert server.request("GET", f"{path}/items/{added['first_id']}").json() == added["data"][0]
    assert server.request("POST", path, json={"metadata": {"c": "d"}}).json()["metadata"] == {"c": "d"}
    assert server.request("GET", path).json()["metadata"] == {"c": "d"}
    both = {"conversation": conversation["id"], "previous_response_id": response["id"]}
    assert error_of(server, **both)["param"] == "conversation"
    assert server.request("DELETE", path).json()["deleted"] is True
    assert error_of(server, 404, conversation=conversation["id"])["code"] == "conversation_not_found"


def test_what_is_deleted_while_it_grows_stays_deleted(server):
    conversation = server.request("POST", "/v1/conversations", json={}).json()["id"]
    body = {"model": "tiny", "input": "x", "conversation": conversation, **GREEDY, "max_output_tokens": 300}
    answer = server.begin("POST", PATH, json=body)
    while not (running := list(server.state.responses.running)):
        assert not answer.done()
        time.sleep(0.001)
    paths = (f"/v1/conversations/{conversation}", f"{PATH}/{running[0]}")
    assert all(server.request("DELETE", path).json()["deleted"] for path in paths)
    assert answer.result(timeout=120).json()["id"] == running[0]
    assert [server.request("GET", path).status_code for path in paths] == [404, 404]


def test_truncation(server):
    turns = [{"role": "user", "content": f"{index} " + "x" * 100} for index in range(10)]
    assert error_of(server, input=turns)["code"] in ("invalid_value", "context_length_exceeded")
    kept = respond(server, turns, truncation="auto", instructions="i")
    fits = [respond(server, turns[index:], instructions="i", store=False) for index in (7, 6)]
    assert kept["usage"]["input_tokens"] in [each["usage"]["input_tokens"] for each in fits]
    assert kept["usage"]["input_tokens"] + 4 <= 512 < kept["usage"]["input_tokens"] + 4 + 102


def test_input_tokens(server):
    response = respond(server, instructions="a")
    counted = server.post(f"{PATH}/input_tokens", input="hello", instructions="a")
    assert counted == {"object": "response.input_tokens", "input_tokens": response["usage"]["input_tokens"]}
