"""A budget of thinking ends no call that the model begins within its thought, whatever the format."""

from __future__ import annotations

import json
from typing import Any

import pytest
from asgi import AppThread, Serve
from call_texts import FORMATS
from forced_tokens import FORCED

from vllm.answers.answer import AnswerFormat

CITY = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
TOOLS = [{"type": "function", "function": {"name": "weather", "parameters": CITY}}]
ARGUMENTS = {"city": "Oslo or else Trondheim"}
THINKERS = {
    "qwen3": "hermes", "glm45": "glm45", "nemotron_v3": "qwen3_coder", "ernie45": "hermes", "hy_v3": "hy_v3",
    "minimax_m2": "minimax_m2", "kimi_k2": "kimi_k2", "gemma4": "gemma4", "minimax_m3": "minimax_m3",
    "k2_horizon": "k2_horizon", "cohere_command3": "cohere_command3", "plamo3": "plamo3",
    "openai_gptoss": "openai", "muse": "muse", "inkling": "inkling",
}  # fmt: skip


DRAFTS = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 1, "prompt_lookup_max": 3}


@pytest.fixture(scope="module", params=[FORCED, {**FORCED, "speculative_config": DRAFTS}], ids=["alone", "drafts"])
def server(serve: Serve, request: pytest.FixtureRequest) -> AppThread:
    return serve(request.param, chat_template="{{ messages[0].content }}")


def ask(server: AppThread, text: str, **body: Any) -> dict[str, Any]:
    """The message of an answer that is `text` as far as nothing forbids it."""
    ids = server.engine.input_processor.tokenizer.encode(text, add_special_tokens=False)
    body = {
        "model": "tiny", "messages": [{"role": "user", "content": "?"}], "tools": TOOLS, "temperature": 0,
        "vllm_xargs": {"forced": ids, "obeys": True}, "max_tokens": len(ids), **body,
    }  # fmt: skip
    if not body.get("stream"):
        return server.post("/v1/chat/completions", **body)["choices"][0]["message"]
    response = server.request("POST", "/v1/chat/completions", json=body)
    lines = [json.loads(line[6:]) for line in response.text.splitlines() if line.startswith("data: {")]
    deltas = [choice["delta"] for line in lines for choice in line["choices"]]
    calls = [call["function"] for each in deltas for call in each.get("tool_calls") or ()]
    function = {"name": calls[0]["name"], "arguments": "".join(each["arguments"] for each in calls)} if calls else {}
    return {
        "reasoning": "".join(each.get("reasoning") or "" for each in deltas),
        "content": "".join(each.get("content") or "" for each in deltas) or None,
        "tool_calls": [{"function": function}] if calls else [],
    }


@pytest.mark.parametrize("thinker", THINKERS)
def test_a_call_ends_the_thought(server, monkeypatch, thinker):
    stream = server.engine.vllm_config.speculative_config is not None  # either once
    form = AnswerFormat.of(None, THINKERS[thinker], thinker)
    monkeypatch.setattr(server.state, "answer_format", lambda own=None: form)
    write, _ = FORMATS[THINKERS[thinker]]
    begin = "" if form.reasoning.is_implicit else form.reasoning.begins[0] + form.reasoning.drops
    thought = "I look. "
    call = ("<|start|>assistant" if thinker == "openai_gptoss" else "") + write(("weather", ARGUMENTS))
    least, most = (
        len(server.engine.input_processor.tokenizer.encode(form.reasoning.drops + each, add_special_tokens=False))
        for each in (thought, thought + call)
    )
    budget = most - 9
    message = ask(server, begin + thought + call, thinking_token_budget=budget, stream=stream)
    (called,) = message["tool_calls"]
    assert json.loads(called["function"]["arguments"]) == ARGUMENTS
    assert message["reasoning"].strip() == thought.strip() and not (message["content"] or "").strip()
    # The budget holds where no call ends the thought.
    longer = begin + thought * 10
    spent = ask(server, longer, thinking_token_budget=least, stream=stream)
    assert spent["reasoning"].strip() == thought.strip()


@pytest.mark.parametrize("begin", ["<think>", "\n<think>"])
def test_white_space_may_come_before_a_thought(server, monkeypatch, begin):
    form = AnswerFormat.of(None, "hermes", "qwen3")
    monkeypatch.setattr(server.state, "answer_format", lambda own=None: form)
    message = ask(server, f"{begin}I look for it", thinking_token_budget=7, tools=None, max_tokens=40)
    assert message["reasoning"] == "I look "


@pytest.mark.parametrize("marker", ["<tool_call>", "<|tool_calls_section_begin|>"])
def test_a_thought_before_a_form_holds_no_call(server, monkeypatch, marker):
    form = AnswerFormat.of(None, "hermes", "qwen3" if marker == "<tool_call>" else "kimi_k2")
    monkeypatch.setattr(server.state, "answer_format", lambda own=None: form)
    schema = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"enum": [7]}}}
    message = ask(server, f"<think>a{marker}</think>7", response_format=schema, tools=None, max_tokens=80)
    assert message["content"] == "7" and message["reasoning"].startswith(f"a{marker[:-1]}")
