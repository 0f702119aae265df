"""Tools of chat requests: calls in forced texts are parsed, forced calls are valid."""

from __future__ import annotations

import json
from typing import Any

import openai
import pytest
from asgi import AppThread, Serve
from byte_tokenizer import byte_ids
from forced_tokens import FORCED

TEMPLATE = (
    "{% if tools %}{{ tools | length }} <tool_call>{% endif %}"
    "{% for m in messages %}{{ m.role }}: {{ m.content }}"
    "{% for c in m.tool_calls or [] %}[{{ c.function.name }} {{ c.function.arguments.city }}]{% endfor %}"
    "{{ m.tool_call_id }}\n{% endfor %}"
)
CITY = {"type": "object", "properties": {"city": {"enum": ["Oslo", "Rome"]}}, "required": ["city"]}
WEATHER = {"type": "function", "function": {"name": "weather", "parameters": CITY}}
NOW = {"type": "function", "function": {"name": "now", "parameters": {"type": "object", "properties": {}}}}
TOOLS = [WEATHER, NOW]
USER = [{"role": "user", "content": "?"}]
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo"}}\n</tool_call>'


@pytest.fixture(scope="module")
def server(serve: Serve) -> AppThread:
    return serve(FORCED, chat_template=TEMPLATE)


def ask(server: AppThread, text: str | None = None, **body: Any) -> dict[str, Any]:
    """The choice of a whole answer, which is `text` if given."""
    if text is not None:
        ids = byte_ids(text)
        body |= {"vllm_xargs": {"forced": ids}, "max_tokens": len(ids), "temperature": 0}
    answer = server.post(
        "/v1/chat/completions", **{"messages": USER, "max_tokens": 200, "tools": TOOLS, "seed": 0, **body}
    )
    return answer["choices"][0]


def streamed(server: AppThread, text: str | None = None, **body: Any) -> list[dict[str, Any]]:
    """The choices of its chunks."""
    if text is not None:
        ids = byte_ids(text)
        body |= {"vllm_xargs": {"forced": ids}, "max_tokens": len(ids), "temperature": 0}
    body = {"model": "tiny", "messages": USER, "max_tokens": 200, "tools": TOOLS, "seed": 0, "stream": True, **body}
    response = server.request("POST", "/v1/chat/completions", json=body)
    assert response.status_code == 200, response.text
    lines = [line[6:] for line in response.text.splitlines() if line.startswith("data: ")]
    assert lines[-1] == "[DONE]"
    return [choice for line in lines[:-1] for choice in json.loads(line)["choices"]]


def joined(chunks: list[dict[str, Any]]) -> tuple[str, list[dict[str, str]]]:
    """The content and the calls of a stream; each call's id and name come once, before its arguments."""
    content, calls = "", []
    for chunk in chunks:
        content += chunk["delta"].get("content") or ""
        for call in chunk["delta"].get("tool_calls") or ():
            if "id" in call:
                assert call["index"] == len(calls) and call["type"] == "function"
                calls.append({"name": call["function"]["name"], "arguments": ""})
            calls[call["index"]]["arguments"] += call["function"]["arguments"]
    return content, calls


def test_calls_in_a_text_are_parsed(server):
    choice = ask(server, f"Let me see.\n{CALL}\n{CALL}")
    message = choice["message"]
    assert (message["content"], choice["finish_reason"]) == ("Let me see.", "length")
    assert [each["function"]["name"] for each in message["tool_calls"]] == ["weather", "weather"]
    assert [json.loads(each["function"]["arguments"]) for each in message["tool_calls"]] == [{"city": "Oslo"}] * 2
    assert len({each["id"] for each in message["tool_calls"]}) == 2


def test_streams_have_the_same_calls_piece_by_piece(server):
    chunks = streamed(server, f"Let me see.\n{CALL}\n{CALL}")
    content, calls = joined(chunks)
    assert content == "Let me see."
    assert calls == [{"name": "weather", "arguments": '{"city": "Oslo"}'}] * 2
    pieces = [each for chunk in chunks for each in chunk["delta"].get("tool_calls") or ()]
    assert len(pieces) > 10
    assert chunks[0]["delta"]["role"] == "assistant" and "role" not in chunks[1]["delta"]
    assert [chunk["finish_reason"] for chunk in chunks if chunk["finish_reason"]] == ["length"]


def test_a_stop_after_a_call_says_tool_calls(server):
    end = {"stop": ["</tool_call>"], "include_stop_str_in_output": True}
    assert ask(server, CALL + "x", **end)["finish_reason"] == "tool_calls"
    assert streamed(server, CALL + "x", **end)[-1]["finish_reason"] == "tool_calls"
    assert ask(server, "No.</tool_call>x", **end)["finish_reason"] == "stop"


def test_text_without_calls_is_content(server):
    for text in ("Hello.", "<tool_call> is a tag <", " a \n"):
        choice = ask(server, text)
        assert choice["message"]["content"] == text and "tool_calls" not in choice["message"]
        assert joined(streamed(server, text)) == (text, [])


def test_choice_none_leaves_the_text_as_it_is(server):
    assert ask(server, CALL, tool_choice="none")["message"]["content"] == CALL


def test_one_call_at_most(server):
    two = f"{CALL}\n{CALL}"
    assert len(ask(server, two, parallel_tool_calls=False)["message"]["tool_calls"]) == 1
    assert len(joined(streamed(server, two, parallel_tool_calls=False))[1]) == 1


@pytest.mark.parametrize("seed", range(3))
def test_forced_calls_are_valid(server, seed):
    body = {"tool_choice": "required", "seed": seed, "temperature": 1, "parallel_tool_calls": False}
    choice = ask(server, **body)
    (call,) = choice["message"]["tool_calls"]
    arguments = json.loads(call["function"]["arguments"])
    assert arguments == {} if call["function"]["name"] == "now" else arguments["city"] in ("Oslo", "Rome")
    assert (choice["message"]["content"], choice["finish_reason"]) == (None, "tool_calls")
    assert joined(streamed(server, **body)) == ("", [{k: call["function"][k] for k in ("name", "arguments")}])


def test_a_named_function_is_called(server):
    for name in ("weather", "now"):
        for choice in ({"type": "function", "function": {"name": name}}, {"type": "function", "name": name}):
            (call,) = ask(server, tool_choice=choice, temperature=1, seed=0)["message"]["tool_calls"]
            assert call["function"]["name"] == name


def test_without_a_format_forced_calls_are_json(server):
    template = {"chat_template": "{{ messages[0].content }}"}
    (call,) = ask(server, tool_choice="required", parallel_tool_calls=False, **template)["message"]["tool_calls"]
    assert call["function"]["name"] in ("weather", "now")
    response = server.request(
        "POST", "/v1/chat/completions", json={"model": "tiny", "messages": USER, "tools": TOOLS, **template}
    )
    error = response.json()["error"]
    assert (response.status_code, error["param"]) == (400, "tools")
    assert "--tool-call-parser" in error["message"] and "hermes" in error["message"]


def test_strict_tools_bind_calls_in_free_text(server):
    strict = [{"type": "function", "function": {**WEATHER["function"], "strict": True}}]
    # The rest of a call behind its forced beginning is the model's, and the grammar's.
    for beginning in ("Well: <tool_call>", '<tool_call>\n{"name": "weather", "arguments": {'):
        ids = byte_ids(beginning)
        body = {"vllm_xargs": {"forced": ids}, "max_tokens": 120, "temperature": 1, "seed": 1, "tools": strict}
        body |= {"parallel_tool_calls": False}
        (call,) = ask(server, **body)["message"]["tool_calls"]
        assert call["function"]["name"] == "weather"
        assert json.loads(call["function"]["arguments"])["city"] in ("Oslo", "Rome")


def test_a_form_of_the_answer_beside_tools(server):
    schema = {"type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"], "additionalProperties": False}
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    for seed in range(4):
        message = ask(server, response_format=form, temperature=1, seed=seed, parallel_tool_calls=False)["message"]
        if message["content"] is None:
            (call,) = message["tool_calls"]
            assert call["function"]["name"] in ("weather", "now")
        else:
            assert json.loads(message["content"])["a"] in (1, 2)


def test_a_forced_call_wins_over_the_form_of_a_text(server):
    """There is no text that the form could be of. A form of whole answers may be that of the call's arguments."""
    named = {"type": "function", "function": {"name": "weather"}}
    other = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "object"}}}
    for fields in (
        {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": CITY}}},
        {"response_format": other},
        {"response_format": {"type": "json_object"}},
        {"guided_json": CITY},
        {"structured_outputs": {"json": json.dumps(CITY)}},
    ):
        message = ask(server, tool_choice=named, temperature=0, **fields)["message"]
        (call,) = message["tool_calls"]
        assert json.loads(call["function"]["arguments"])["city"] in ("Oslo", "Rome") and message["content"] is None
    for fields in ({"guided_json": {"type": "object"}}, {"guided_choice": ["Oslo"]}):
        body = {"model": "tiny", "messages": USER, "tools": TOOLS, "tool_choice": named, **fields}
        error = server.request("POST", "/v1/chat/completions", json=body).json()["error"]
        assert error["param"] == "tool_choice" and "exclude each other" in error["message"]


def test_older_names(server):
    body = {"tools": None, "functions": [WEATHER["function"]]}
    choice = ask(server, function_call={"name": "weather"}, temperature=1, **body)
    assert choice["message"]["function_call"]["name"] == "weather"
    assert choice["finish_reason"] == "function_call"
    assert json.loads(choice["message"]["function_call"]["arguments"])["city"] in ("Oslo", "Rome")
    pieces = [
        chunk["delta"]["function_call"] for chunk in streamed(server, CALL, **body) if "function_call" in chunk["delta"]
    ]
    assert pieces[0]["name"] == "weather"
    assert json.loads("".join(each["arguments"] for each in pieces)) == {"city": "Oslo"}


def rendered(server: AppThread, **body: Any) -> str:
    return server.post("/v1/chat/completions/render", **{"messages": USER, **body})["prompt"]


def test_history_of_calls_reaches_the_template(server):
    call = {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Oslo"}'}}
    history = [
        *USER,
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c1", "content": [{"type": "text", "text": "cold"}]},
    ]
    assert rendered(server, messages=history, tools=TOOLS) == (
        "2 <tool_call>user: ?\nassistant: [weather Oslo]\ntool: coldc1\n"
    )


def test_allowed_tools_are_the_only_ones(server):
    allowed = {"mode": "required", "tools": [{"type": "function", "function": {"name": "now"}}]}
    choice = {"type": "allowed_tools", "allowed_tools": allowed}
    assert rendered(server, tools=TOOLS, tool_choice=choice).startswith("1 ")
    (call,) = ask(server, tool_choice=choice, parallel_tool_calls=False)["message"]["tool_calls"]
    assert (call["function"]["name"], json.loads(call["function"]["arguments"])) == ("now", {})


BAD = [
    ({"tools": [{"type": "web_search"}]}, "tools", "unsupported_field"),
    ({"tools": [{"type": "function"}]}, "tools", "invalid_value"),
    ({"tools": [{"type": "function", "function": {"name": ""}}]}, "tools", "invalid_value"),
    ({"tools": [{"type": "function", "function": {"name": "f", "parameters": [1]}}]}, "tools", "invalid_value"),
    ({"tools": TOOLS, "tool_choice": "sometimes"}, "tool_choice", "invalid_value"),
    ({"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "g"}}}, "tool_choice", "invalid_value"),
    ({"tools": TOOLS, "tool_choice": {"type": "custom", "custom": {"name": "g"}}}, "tool_choice", "invalid_value"),
    ({"tool_choice": "required"}, "tool_choice", "invalid_value"),
    ({"tools": [], "tool_choice": "required"}, "tool_choice", "invalid_value"),
    ({"tools": TOOLS, "tool_choice": "required", "guided_regex": "a"}, "tool_choice", "invalid_value"),
    ({"tools": TOOLS, "guided_regex": "a"}, "tools", "unsupported_field"),
    ({"functions": [{}]}, "functions", "invalid_value"),
]  # fmt: skip


@pytest.mark.parametrize(("body", "param", "code"), BAD)
def test_what_cannot_be_honoured_is_refused_by_name(server, body, param, code):
    response = server.request("POST", "/v1/chat/completions", json={"model": "tiny", "messages": USER, **body})
    error = response.json()["error"]
    assert (response.status_code, error["param"], error["code"]) == (400, param, code), error


def test_schemas_that_no_grammar_keeps_are_named(server):
    for schema, says in (
        ({"type": "string"}, "the schema of an object"),
        ({"properties": {"a": {"type": "dict"}}}, "dict"),
    ):
        tools = [{"type": "function", "function": {"name": "f", "parameters": schema}}]
        body = {"model": "tiny", "messages": USER, "tools": tools, "tool_choice": "required"}
        error = server.request("POST", "/v1/chat/completions", json=body).json()["error"]
        assert error["param"] == "tools" and says in error["message"] and "structured_outputs" not in error["message"]


def test_reasoning_alone_is_a_message(server):
    history = [*USER, {"role": "assistant", "content": None, "reasoning": "Hm.", "refusal": None}, *USER]
    assert ask(server, "Hello.", messages=history)["message"]["content"] == "Hello."


def test_openai_client_on_the_embedded_model(live_server):
    client = openai.OpenAI(base_url=f"{live_server.url}/v1", api_key="none")
    weather = {
        "type": "function",
        "function": {**WEATHER["function"], "strict": True, "parameters": {**CITY, "additionalProperties": False}},
    }
    options: Any = {
        "model": "smollm2", "messages": [{"role": "user", "content": "Weather in Rome?"}], "tools": [weather],
        "max_completion_tokens": 60,
    }  # fmt: skip
    for choice in ("required", {"type": "function", "function": {"name": "weather"}}):
        answer = client.chat.completions.create(**options, tool_choice=choice, parallel_tool_calls=False)
        (call,) = answer.choices[0].message.tool_calls
        assert json.loads(call.function.arguments)["city"] in ("Oslo", "Rome")
        with client.chat.completions.stream(**options, tool_choice=choice, parallel_tool_calls=False) as stream:
            kinds = {event.type for event in stream}
            final = stream.get_final_completion()
        assert {"tool_calls.function.arguments.delta", "tool_calls.function.arguments.done"} <= kinds
        (call,) = final.choices[0].message.tool_calls
        assert call.function.parsed_arguments["city"] in ("Oslo", "Rome")
        assert final.choices[0].finish_reason == "tool_calls"
