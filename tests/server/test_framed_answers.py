"""Answers with markup around their parts, over HTTP: strict and forced calls after reasoning, and plain answers."""

from __future__ import annotations

import json
from typing import Any

import pytest
from asgi import AppThread, Serve
from forced_tokens import FORCED

from vllm.tool_parsers import ToolParserManager

CITY = {"type": "object", "properties": {"city": {"enum": ["Oslo", "Rome"]}}, "required": ["city"]}
TOOLS = [{"type": "function", "function": {"name": "weather", "parameters": CITY, "strict": True}}]
FORMATS = {
    # name: reasoning, an answer up to its content, and what follows that, the beginning of a call
    "kimi_k3": (
        "<|open|>think<|sep|>Hm.<|close|>think<|sep|>",
        "<|open|>response<|sep|>I look.",
        "<|close|>response<|sep|>",
        "<|open|>tools<|sep|>",
    ),
    "cohere_command3": (
        "<|START_THINKING|>Hm.<|END_THINKING|>",
        "<|START_RESPONSE|>I look.",
        "<|END_RESPONSE|>",
        "<|START_ACTION|>",
    ),
    "hy_v3": ("<think>Hm.</think>", "I look.", "", "<tool_calls>"),
}


TEMPLATE = "{{% for message in messages %}}{{{{ message.content }}}}{{% endfor %}}\n{{# {} #}}"


@pytest.fixture(scope="module")
def server(serve: Serve) -> AppThread:
    return serve(FORCED, reasoning_parser="auto")


def ask(server: AppThread, beginning: str, **body: Any) -> dict[str, Any]:
    """The message of an answer that begins so, and goes on as the model and the grammar will."""
    ids = server.engine.input_processor.tokenizer.encode(beginning, add_special_tokens=False)
    fixed = {
        "vllm_xargs": {"forced": ids},
        "max_tokens": 300,
        "seed": 1,
        "messages": [{"role": "user", "content": "?"}],
    }
    return server.post("/v1/chat/completions", **fixed | body)["choices"][0]["message"]


@pytest.mark.parametrize("name", FORMATS)
def test_strict_and_forced_calls_and_texts(server, name):
    thought, text, end, call = FORMATS[name]
    marks = (*ToolParserManager.get_tool_parser(name).template_marks, thought)
    template = TEMPLATE.format(" ".join(marks))
    fields = {"chat_template": template, "tools": TOOLS, "parallel_tool_calls": False}
    for choice, beginning in (("auto", thought + text + end + call), ("required", thought)):
        message = ask(server, beginning, tool_choice=choice, **fields)
        (found,) = message["tool_calls"]
        assert message["reasoning"] == "Hm."
        assert json.loads(found["function"]["arguments"])["city"] in ("Oslo", "Rome")
        assert (message["content"] or "").startswith("I look.") == (choice == "auto")
    message = ask(server, thought + text + end, tool_choice="none", **fields | {"max_tokens": 120})
    assert message["reasoning"] == "Hm." and message["content"].startswith("I look.")
    assert not end or end not in message["content"]
