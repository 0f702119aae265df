"""Good requests that look like bad ones: what OpenAI's clients send, nulls, values that ask for nothing."""

from __future__ import annotations

import json

import pytest
from asgi import client_of
from bad_bodies import CHAT, COMPLETION, DETOKENIZE, MESSAGE, RESPONSE, SCORING, SURROGATE, TOKENIZE
from byte_tokenizer import byte_id

from vllm.server.protocol.generation import ChatCompletionRequest, CompletionRequest
from vllm.server.protocol.messages import MessagesRequest
from vllm.server.protocol.responses import ResponsesRequest
from vllm.server.protocol.scoring import GenerativeScoringRequest, ScoringRequest
from vllm.server.protocol.tokenization import DetokenizeRequest, TokenizeRequest

GREEDY = {"temperature": 0, "ignore_eos": True}
TEMPLATE = {"chat_template": "{{ messages[0].content }}"}
BODIES = {
    "/v1/completions": {**COMPLETION, **GREEDY},
    "/v1/chat/completions": {**CHAT, **GREEDY, **TEMPLATE},
    "/v1/messages": {**MESSAGE, **GREEDY, **TEMPLATE},
    "/v1/responses": {**RESPONSE, **GREEDY, **TEMPLATE},
    "/generative_scoring": SCORING,
    "/v1/score": SCORING,
    "/tokenize": TOKENIZE,
    "/detokenize": DETOKENIZE,
}
MODELS = {
    "/v1/completions": CompletionRequest,
    "/v1/chat/completions": ChatCompletionRequest,
    "/v1/messages": MessagesRequest,
    "/v1/responses": ResponsesRequest,
    "/generative_scoring": GenerativeScoringRequest,
    "/v1/score": ScoringRequest,
    "/tokenize": TokenizeRequest,
    "/detokenize": DetokenizeRequest,
}
GENERATING = ["/v1/completions", "/v1/chat/completions"]

# As they come from clients, and are of no consequence here.
OPENAI_FIELDS = {
    "user": "user-1234",
    "metadata": {"topic": "demo", "n": [1, None]},
    "store": True,
    "service_tier": "auto",
    "safety_identifier": "hash",
    "prompt_cache_key": "key",
    "prompt_cache_retention": "24h",
    "parallel_tool_calls": False,
    "session_id": "s",
}
HARMLESS = dict.fromkeys(BODIES, OPENAI_FIELDS) | {
    "/v1/messages": {
        "metadata": {"user_id": "u"}, "service_tier": "auto", "cache_control": {"type": "ephemeral"}, "tools": [],
        "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]}, "mcp_servers": [],
        "thinking": {"type": "disabled"}, "tool_choice": {"type": "auto"}, "speed": "standard",
    },
    "/v1/responses": {
        "store": False, "metadata": {"topic": "demo"}, "service_tier": "auto", "user": "u", "safety_identifier": "s",
        "prompt_cache_key": "k", "background": False, "max_tool_calls": 3, "truncation": "disabled", "tools": [],
        "parallel_tool_calls": False, "include": ["reasoning.encrypted_content"], "text": {"verbosity": "low"},
        "reasoning": {"summary": "auto", "effort": "high"}, "prompt_cache_retention": "24h", "tool_choice": "auto",
    },
}  # fmt: skip


def content(answer):
    """The answer without the request's own: no id, no time, nothing that a response repeats."""
    if isinstance(answer, list):
        return [content(each) for each in answer]
    if isinstance(answer, dict):
        names = ("output",) if "output" in answer else answer.keys() - {"id", "created"}
        return {name: content(answer[name]) for name in names}
    return answer


def same(server, path, **fields):
    """The answer with these fields is the one without them."""
    return content(server.post(path, **{**BODIES[path], **fields})) == content(server.post(path, **BODIES[path]))


@pytest.mark.parametrize("path", BODIES)
def test_harmless_fields_change_nothing(server, path):
    assert same(server, path, **(dict.fromkeys(MODELS[path].ACCEPTED, "any") | HARMLESS[path]))


@pytest.mark.parametrize("path", GENERATING)
def test_what_would_change_something_is_refused_by_name(server, path):
    for name, value in (("audio", {"voice": "alloy"}), ("web_search_options", {}), ("modalities", ["text", "audio"])):
        body = {"model": "tiny", **BODIES[path], name: value}
        error = server.request("POST", path, json=body).json()["error"]
        assert (error["param"], error["code"]) == (name, "unsupported_field")


@pytest.mark.parametrize("path", GENERATING)
def test_streams_may_ask_for_obfuscation(server, path):
    for wanted in (True, False):
        chunks = server.stream(path, **BODIES[path], stream_options={"include_obfuscation": wanted})
        assert "obfuscation" not in chunks[0] and "usage" not in chunks[-1]


@pytest.mark.parametrize("path", BODIES)
def test_what_asks_for_nothing_is_no_fault(server, path):
    for name, (neutral, _) in MODELS[path].REFUSED.items():
        for value in (*neutral, None):
            assert same(server, path, **{name: value}), (name, value)


@pytest.mark.parametrize("path", BODIES)
def test_null_is_as_if_left_out(server, path):
    """One by one and all together."""
    model = MODELS[path]
    optional = {name for name, field in model.model_fields.items() if not field.is_required()}
    unset = optional - set(BODIES[path])
    for name in unset:
        assert same(server, path, **{name: None}), name
    assert same(server, path, **dict.fromkeys([*unset, *model.ACCEPTED, *model.REFUSED]))


@pytest.mark.parametrize("path", GENERATING)
def test_integers_are_numbers(server, path):
    fields = {"temperature": 1, "top_p": 1, "min_p": 0, "presence_penalty": 0, "repetition_penalty": 1}
    answer = server.post(path, **{**BODIES[path], **fields, "logit_bias": {"7": 1}})
    assert answer["choices"][0]["finish_reason"] == "length"


@pytest.mark.parametrize("path", GENERATING)
def test_integers_may_have_a_point(server, path):
    """As JSON of clients without integers has them."""
    fields = {
        "max_tokens": 3.0, "top_k": -1.0, "seed": 7.0, "min_tokens": 1.0, "n": 1.0, "best_of": 1.0, "priority": 0.0,
        "truncate_prompt_tokens": 2.0, "prompt_logprobs": 1.0, "prompt_logprob_start": 0.0,
    }  # fmt: skip
    fields |= {"logprobs": True, "top_logprobs": 2.0} if "chat" in path else {"logprobs": 2.0}
    integers = {name: value if value is True else int(value) for name, value in fields.items()}
    body = BODIES[path]
    assert content(server.post(path, **{**body, **fields})) == content(server.post(path, **{**body, **integers}))


@pytest.mark.parametrize("path", GENERATING)
def test_biases_beyond_the_limits_are_cut(server, path):
    key = str(byte_id(ord("a")))
    answers = [server.post(path, **{**BODIES[path], "logit_bias": {key: bias}}) for bias in (100, 250, 1e300)]
    assert content(answers[0]) == content(answers[1]) == content(answers[2])
    assert same(server, path, logit_bias={key: -101}) and same(server, path, logit_bias={})


@pytest.mark.parametrize("path", GENERATING)
def test_limits_themselves_are_taken(server, path):
    fields = {
        "temperature": 1e30, "top_p": 1e-300, "top_k": 2**31 - 1, "min_p": 1, "presence_penalty": 2,
        "frequency_penalty": -2, "repetition_penalty": 2, "seed": -(2**63), "stop": ["x"] * 1024,
        "truncate_prompt_tokens": 128, "request_id": "~" * 128, "logprob_token_ids": list(range(128)),
    }  # fmt: skip
    assert server.post(path, **{**BODIES[path], **fields})["choices"][0]["readings"]


@pytest.mark.parametrize("path", GENERATING)
def test_ids_asked_twice_are_read_once(server, path):
    a, b = byte_id(ord("a")), byte_id(ord("b"))
    answer = server.post(path, **{**BODIES[path], "logprob_token_ids": [b, a, b, b], "labels": ["a"]})
    (reading,) = answer["choices"][0]["readings"]
    assert list(reading["ids"]) == [str(b), str(a)]
    assert reading["ids"][str(a)]["label"] == "a"
    assert sum(each["probability"] for each in reading["ids"].values()) == pytest.approx(1)


@pytest.mark.parametrize("path", GENERATING)
def test_max_tokens_that_are_left_out_end_with_the_context(server, path):
    """No silent cut: nobody asked for more."""
    text = "a" * 125
    body = {name: value for name, value in BODIES[path].items() if name != "max_tokens"}
    long = {"prompt": text} if path == "/v1/completions" else {"messages": [{"role": "user", "content": text}]}
    assert server.post(path, **{**body, **long})["usage"]["total_tokens"] == 128
    assert server.post(path, **{**body, **long, "max_tokens": 3})["usage"]["total_tokens"] == 128
    answer = server.request("POST", path, json={**body, **long, "max_tokens": 4})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "max_tokens")


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize(
    "kind", ["application/json; charset=utf-8", "APPLICATION/JSON", "application/vnd.api+json", None]
)
def test_content_types(server, path, kind):
    data = json.dumps(BODIES[path]).encode()
    headers = {"Content-Type": kind} if kind else {}
    assert server.request("POST", path, content=data, headers=headers).status_code == 200
    marked = server.request("POST", path, content=b"\xef\xbb\xbf" + data, headers=headers)
    assert marked.status_code == 200


@pytest.mark.parametrize("path", GENERATING)
def test_unknown_fields_that_ask_for_nothing_pass(server, path):
    answer = server.request("POST", path, json={**BODIES[path], "of_another_version": None})
    assert answer.status_code == 200, answer.text
    assert server.request("POST", path, json={**BODIES[path], "of_another_version": 0}).status_code == 400


UNKNOWN = {"tempratur": 2, "zzz": [1], "": None, SURROGATE: 1, "x" * 1000: 1}


@pytest.mark.parametrize("path", BODIES)
def test_unknown_fields_may_be_ignored(server, path):
    body = {**BODIES[path], **UNKNOWN}
    if path in GENERATING:
        body["stream_options"] = {"include_usag": True}

    async def ask(**more):
        async with client_of(server.engine, ignore_unknown_fields=True, access_log=False) as client:
            data = json.dumps({**body, **more})
            return await client.post(path, content=data, headers={"Content-Type": "application/json"})

    answer = server.run(ask())
    assert answer.status_code == 200, answer.text
    assert content(answer.json()) == content(server.post(path, **BODIES[path]))
    if path in GENERATING:
        # A field that is known and asked for is not ignored.
        answer = server.run(ask(tools=[{"type": "function"}]))
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "tools")
        answer = server.run(ask(temperature="hot"))
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "temperature")
