"""Tools and a chat template that ignores them: a warning, a word in the log, and --tool-prompt generic."""

from __future__ import annotations

import json
import logging
from typing import Any

import pytest
from asgi import AppThread, Serve, client_of
from byte_tokenizer import byte_ids
from forced_tokens import FORCED

from vllm import logger as vllm_logger
from vllm.server.http import middleware
from vllm.server.server_args import ServerArgs
from vllm.server.state import ServerState

IGNORES = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}assistant:"
SHOWS = "{{ tools | tojson if tools else '' }}" + IGNORES
USER = [{"role": "user", "content": "?"}]
NOW = {"type": "function", "function": {"name": "now", "parameters": {"type": "object", "properties": {}}}}
PATH = "/v1/chat/completions"


@pytest.fixture(scope="module")
def server(serve: Serve) -> AppThread:
    return serve({**FORCED, "max_model_len": 2048})


@pytest.fixture
def warnings(monkeypatch, caplog):
    monkeypatch.setattr(vllm_logger, "_seen", set())
    monkeypatch.setattr(logging.getLogger("vllm"), "propagate", True)
    caplog.set_level(logging.INFO, "vllm")
    return caplog


def post(server: AppThread, path: str, body: dict[str, Any], **args: Any) -> dict[str, Any]:
    async def send() -> Any:
        async with client_of(server.engine, **{"access_log": False, **args}) as client:
            return await client.post(path, json={"model": "tiny", "messages": USER, "tools": [NOW], **body})

    answer = server.run(send())
    assert answer.status_code == 200, answer.text
    return answer.json()


def prompt(server: AppThread, **args: Any) -> str:
    body = args.pop("body", {})
    return post(server, f"{PATH}/render", {"chat_template": IGNORES, **body}, **args)["prompt"]


def test_a_start_with_tools_warns(server, warnings):
    for template, args, warns in (
        (IGNORES, {"enable_auto_tool_choice": True, "tool_call_parser": "hermes"}, True),
        (IGNORES, {"tool_call_parser": "hermes"}, True),
        (IGNORES, {}, False),
        (IGNORES, {"tool_call_parser": "hermes", "tool_prompt": "generic"}, False),
        (SHOWS, {"tool_call_parser": "hermes"}, False),
    ):
        vllm_logger._seen.clear()
        warnings.clear()
        ServerState(server.engine, ServerArgs(**args), template).log_templates()
        assert ("the chat template ignores tools" in warnings.text) is warns, (template, args)


def test_the_answers_line_says_it(server, warnings, monkeypatch):
    lines: list[str] = []
    log = logging.getLogger("vllm.access.test")
    log.setLevel(logging.DEBUG)
    log.handlers, log.propagate = [logging.Handler()], False
    monkeypatch.setattr(log.handlers[0], "emit", lambda record: lines.append(record.getMessage()))
    monkeypatch.setattr(middleware, "access_logger", lambda log_format: log)
    log_args = {
        "access_log": True,
        "access_log_format": "json",
        "tool_call_parser": "hermes",
        "enable_log_outputs": True,
    }
    for path, template, extra in (
        (PATH, IGNORES, {}),
        ("/v1/messages", IGNORES, {"tools": [{"name": "now", "input_schema": {"type": "object"}}]}),
        (PATH, SHOWS, {}),
        (PATH, IGNORES, {"tool_choice": "none"}),
    ):
        post(server, path, {"max_tokens": 1, "chat_template": template, **extra}, **log_args)
    notes = [json.loads(line).get("note") for line in lines]
    assert notes == ["the chat template ignores tools"] * 2 + [None] * 2
    assert "(the chat template ignores tools)" in warnings.text  # of what was generated
    assert "--tool-prompt generic" in warnings.text
    lines.clear()
    post(server, PATH, {"max_tokens": 1, "chat_template": IGNORES}, **{**log_args, "access_log_format": "text"})
    assert lines[0].endswith("note='the chat template ignores tools'")


def test_generic_prompts(server):
    text = prompt(server, tool_prompt="generic")
    assert "You can call functions" in text and '{"name": "now"' in text and "<tool_call>" in text
    assert prompt(server, tool_call_parser="hermes") == "user: ?\nassistant:"
    text = prompt(server, tool_prompt="generic", tool_call_parser="glm45")
    assert "<arg_key>ARGUMENT</arg_key>" in text and "<tool_call>FUNCTION" in text
    # Forced calls of a format that is no JSON are a list of JSON.
    forced = {"tool_choice": "required"}
    text = prompt(server, body=forced, tool_prompt="generic", tool_call_parser="glm45")
    assert '[{"name": "FUNCTION", "parameters": {"ARGUMENT": "VALUE"}}]' in text
    assert prompt(server, body={"tool_choice": "none"}, tool_prompt="generic") == "user: ?\nassistant:"
    native = prompt(server, body={"chat_template": SHOWS}, tool_prompt="generic", tool_call_parser="hermes")
    assert "You can call" not in native and '"now"' in native


def test_calls_in_the_told_way_are_parsed(server):
    ids = byte_ids('<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>')
    body = {"vllm_xargs": {"forced": ids}, "max_tokens": len(ids), "temperature": 0, "chat_template": IGNORES}
    (choice,) = post(server, PATH, body, tool_prompt="generic")["choices"]
    assert choice["message"]["tool_calls"][0]["function"] == {"name": "now", "arguments": "{}"}


def test_a_second_turn_holds_the_call_and_its_result(server):
    call = {"id": "a", "type": "function", "function": {"name": "now", "arguments": "{}"}}
    messages = [*USER, {"role": "assistant", "content": None, "tool_calls": [call]}]
    messages.append({"role": "tool", "tool_call_id": "a", "content": "noon"})
    text = prompt(server, body={"messages": messages}, tool_prompt="generic")
    assert text.endswith('"arguments": {}}\n</tool_call>\nuser: Result of now:\nnoon\nassistant:')


def test_a_parser_whose_calls_cannot_be_told():
    with pytest.raises(ValueError, match="--tool-prompt generic cannot tell how --tool-call-parser muse"):
        ServerArgs(tool_prompt="generic", tool_call_parser="muse").check_parsers()
