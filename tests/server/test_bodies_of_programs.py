"""Bodies as programs of others send them, written from their formats: each gets a complete stream and its usage."""

from __future__ import annotations

import json
from typing import Any

import pytest
from asgi import AppThread, Serve

TEMPLATE = "{% if tools %}<tool_call>{% endif %}{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
READ = {
    "type": "object",
    "properties": {"path": {"type": "string", "description": "The file."}, "limit": {"type": ["integer", "null"]}},
    "required": ["path"],
    "additionalProperties": False,
}
FUNCTION = {"name": "read_file", "description": "Read a file.", "parameters": READ}
TOOL = {"type": "function", "function": FUNCTION}
TEXT = [{"type": "text", "text": "hi"}]
USAGE = {"stream": True, "stream_options": {"include_usage": True}}
CHAT, RESPONSES, MESSAGES = "/v1/chat/completions", "/v1/responses", "/v1/messages"
CACHED = {"cache_control": {"type": "ephemeral"}}

BODIES: dict[str, tuple[str, dict[str, Any]]] = {
    "open-webui": (
        CHAT,
        {
            "messages": [{"role": "system", "content": "s"}, {"role": "user", "content": "hi"}],
            "temperature": 0.8, "top_p": 0.9, "frequency_penalty": 0, "seed": 1, "stop": ["###"], "max_tokens": 4,
            "metadata": {"chat_id": "c", "session_id": "s"}, "user": "u", "tools": [TOOL], "tool_choice": "auto",
            **USAGE,
        },
    ),
    "continue": (
        CHAT,
        {
            "messages": [
                {"role": "user", "content": TEXT},
                {"role": "assistant", "content": "a"},
                {"role": "user", "content": TEXT},
            ],
            "max_tokens": 4, "temperature": 0.5, "stop": ["<|im_end|>"], "stream": True, "tools": [TOOL],
            "parallel_tool_calls": False, "presence_penalty": None, "prediction": None, "reasoning_effort": None,
        },
    ),
    "cline": (
        CHAT,
        {
            "messages": [
                {"role": "system", "content": "s"},
                {"role": "user", "content": [*TEXT, {"type": "text", "text": "<environment_details>"}]},
                {"role": "assistant", "content": None, "tool_calls": [
                    {"id": "c", "type": "function", "function": {"name": "read_file", "arguments": '{"path": "a"}'}},
                ]},
                {"role": "tool", "tool_call_id": "c", "content": "text"},
            ],
            "temperature": 0, "max_completion_tokens": 4, "tools": [TOOL], "tool_choice": "auto",
            "parallel_tool_calls": False, **USAGE,
        },
    ),
    "zed": (
        CHAT,
        {
            "messages": [{"role": "system", "content": TEXT}, {"role": "user", "content": TEXT}],
            "max_completion_tokens": 4, "stop": [], "temperature": 1.0, "tool_choice": "auto",
            "parallel_tool_calls": False, "tools": [TOOL], "prompt_cache_key": "thread", **USAGE,
        },
    ),
    "zed-responses": (
        RESPONSES,
        {
            "input": [{"type": "message", "role": "user", "content": [{"type": "input_text", "text": "hi"}]}],
            "instructions": "s", "max_output_tokens": 4, "parallel_tool_calls": False, "prompt_cache_key": "thread",
            "include": ["reasoning.encrypted_content"], "reasoning": {"effort": "medium", "summary": "auto"},
            "store": False, "stream": True, "tool_choice": "auto",
            "tools": [{"type": "function", **FUNCTION, "strict": None}],
        },
    ),
    "codex": (
        RESPONSES,
        {
            "instructions": "s",
            "input": [
                {"type": "message", "role": "developer", "content": [{"type": "input_text", "text": "d"}]},
                {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "hi"}]},
                {"type": "reasoning", "summary": [], "content": None, "encrypted_content": None},
                {"type": "function_call", "name": "read_file", "arguments": '{"path":"a"}', "call_id": "c"},
                {"type": "function_call_output", "call_id": "c", "output": "text"},
            ],
            "tools": [{"type": "function", **FUNCTION, "strict": False}], "tool_choice": "auto",
            "parallel_tool_calls": False, "reasoning": None, "store": False, "stream": True, "include": [],
            "prompt_cache_key": "k", "max_output_tokens": 4,
        },
    ),
    "aider": (
        CHAT,
        {
            "messages": [{"role": "system", "content": "s"}, {"role": "user", "content": "hi"}],
            "stream": True, "temperature": 0, "max_tokens": 4, "functions": None, "function_call": None,
        },
    ),
    "aider-functions": (
        CHAT,
        {
            "messages": [{"role": "user", "content": "hi"}], "stream": True, "temperature": 0, "max_tokens": 40,
            "functions": [FUNCTION], "function_call": {"name": "read_file"},
        },
    ),
    "claude-code": (
        MESSAGES,
        {
            "max_tokens": 32000, "stream": True, "temperature": 1, "metadata": {"user_id": "u"},
            "system": [{"type": "text", "text": "s", **CACHED}],
            "messages": [
                {"role": "user", "content": [{"type": "text", "text": "hi", **CACHED}]},
                {"role": "assistant", "content": [
                    {"type": "thinking", "thinking": "t", "signature": ""},
                    {"type": "tool_use", "id": "c", "name": "read_file", "input": {"path": "a"}},
                ]},
                {"role": "user", "content": [
                    {"type": "tool_result", "tool_use_id": "c", "content": TEXT, "is_error": False},
                    {"type": "text", "text": "<system-reminder>", **CACHED},
                ]},
            ],
            "tools": [{"name": "read_file", "description": "d", "input_schema": {"$schema": "x", **READ}, **CACHED}],
            "thinking": {"type": "adaptive"}, "output_config": {"effort": "medium"},
            "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
        },
    ),
}  # fmt: skip
ENDS = {
    RESPONSES: ("response.completed", "response.incomplete"),
    MESSAGES: ("message_stop",),
}


@pytest.fixture(scope="module")
def server(serve: Serve) -> AppThread:
    return serve({"max_model_len": 512}, chat_template=TEMPLATE)


@pytest.mark.parametrize("program", BODIES)
def test_a_body_of(server, program):
    path, body = BODIES[program]
    response = server.request("POST", f"{path}?beta=true", json={"model": "tiny", **body})
    assert response.status_code == 200, response.text
    data = [line.removeprefix("data: ") for line in response.text.splitlines() if line.startswith("data: ")]
    if path in ENDS:
        assert json.loads(data[-1])["type"] in ENDS[path]
        return
    *chunks, done = data
    assert done == "[DONE]"
    chunks = [json.loads(chunk) for chunk in chunks]
    if "stream_options" in body:
        assert chunks.pop()["usage"]["completion_tokens"] > 0
    assert chunks[-1]["choices"][0]["finish_reason"] is not None


def test_named_functions_of_older_bodies_are_called(server):
    path, body = BODIES["aider-functions"]
    message = server.post(path, **{**body, "stream": False, "max_tokens": 200})["choices"][0]["message"]
    assert message["function_call"]["name"] == "read_file"
