"""Arguments that Python or JSON does not hold, in answers and histories: never an error of the server's, and JSON."""

from __future__ import annotations

import json
from typing import Any

import pytest
from asgi import AppThread, Serve
from byte_tokenizer import byte_ids
from forced_tokens import FORCED

from vllm.answers.syntax.typed_values import loaded

TEMPLATE = (
    "{% for m in messages %}{{ m.role }}: {{ m.content }}{% for c in m.tool_calls or [] %}"
    "{{ c.function.arguments | tojson }}{% for k, v in c.function.arguments.items() %}{{ k }}={{ v }}{% endfor %}"
    "{% endfor %}\n{% endfor %}"
)
USER = [{"role": "user", "content": "?"}]
SCHEMA = {"type": "object", "properties": {}}
# Each with what an object has of it, and a template writes.
VALUES: dict[str, Any] = {
    "9" * 4400: "9" * 4400,
    "1e999": "1e999",
    "-Infinity": "-Infinity",
    "NaN": "NaN",
    "123456789012345678901234567890": 123456789012345678901234567890,
    '"\\ud800"': "\N{REPLACEMENT CHARACTER}",
    "[" * 250 + "]" * 250: None,
}
DOORS: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {
        "messages": USER,
        "tools": [{"type": "function", "function": {"name": "f", "parameters": SCHEMA}}],
    },
    "/v1/responses": {"input": "?", "tools": [{"type": "function", "name": "f", "parameters": SCHEMA}]},
    "/v1/messages": {"messages": USER, "tools": [{"name": "f", "input_schema": SCHEMA}]},
}


@pytest.fixture(scope="module")
def server(serve: Serve) -> AppThread:
    return serve({**FORCED, "max_model_len": 16384}, chat_template=TEMPLATE, tool_call_parser="hermes")


def history(value: str) -> list[dict[str, Any]]:
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": f'{{"x": {value}}}'}}
    return [*USER, {"role": "assistant", "tool_calls": [call]}, {"role": "tool", "tool_call_id": "c", "content": "r"}]


@pytest.mark.parametrize("url", DOORS)
@pytest.mark.parametrize("stream", [False, True])
def test_answers_are_json(server, url, stream):
    limit = "max_output_tokens" if url == "/v1/responses" else "max_tokens"
    for value, expected in VALUES.items():
        if len(value) > (500 if url == "/v1/messages" and not stream else 100):
            continue  # as many steps
        ids = byte_ids(f'<tool_call>{{"name": "f", "arguments": {{"x": {value}}}}}</tool_call>')
        body = {"model": "tiny", "temperature": 0, "stream": stream, "vllm_xargs": {"forced": ids}, limit: len(ids)}
        response = server.request("POST", url, json=body | DOORS[url])
        assert response.status_code == 200, response.text[:300]
        data = (
            [line[6:] for line in response.text.splitlines() if line.startswith("data: {")]
            if stream
            else [response.text]
        )
        events = [json.loads(each, parse_constant=pytest.fail) for each in data]
        assert not any(each.get("error") for each in events)
        if not stream and url == "/v1/messages":
            (block,) = events[0]["content"]
            assert block["input"] == {"x": expected} if expected is not None else "INVALID_JSON" in block["input"]


def test_histories_reach_templates(server):
    for value, expected in {**VALUES, "[" * 5000 + "]" * 5000: None}.items():
        body = {"model": "tiny", "messages": history(value)}
        response = server.request("POST", "/v1/chat/completions/render", json=body)
        if expected is None:
            assert response.status_code == 400 and "nested too deeply" in response.json()["error"]["message"]
        else:
            assert response.status_code == 200, response.text[:300]
            assert loaded(f'{{"x": {value}}}') == {"x": expected}
            assert f"x={expected}" in response.json()["prompt"]
