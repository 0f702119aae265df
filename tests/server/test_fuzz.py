"""Mutated requests, a fixed sequence of them: no fault of a client's is one of the server's."""

from __future__ import annotations

import copy
import json
import random
from functools import cache

import pytest
from asgi import AppThread, Serve
from bad_bodies import (
    CHAT,
    COMPLETION,
    DECISION,
    DETOKENIZE,
    MAX_IDS,
    MAX_LOGPROBS,
    MESSAGE,
    RESPONSE,
    SCORING,
    SURROGATE,
    SYSTEM_ONE,
    TOKENIZE,
)

from vllm.server.http.routes import REQUEST_MODELS

MAX_MODEL_LEN = 128
NUM_BODIES = 250
NUM_BYTES = 100

GOOD = {
    "/v1/completions": [
        COMPLETION,
        {**COMPLETION, "prompt": ["ab", "c"], "logprobs": 2, "echo": True, "n": 2, "stop": ["x"], "seed": 7},
        {**COMPLETION, "prompt": [[70, 71]], "logit_bias": {"7": 1.5}, "logprob_token_ids": [7, 8], "stream": True},
        {
            **COMPLETION,
            "labels": ["a", "b"],
            "prompt_logprob_token_ids": [[7]],
            "stream": True,
            "stream_options": {"include_usage": True},
        },
        {**COMPLETION, "logits_indices": [9], "bad_words": ["th"], "min_tokens": 1, "prompt_logprobs": 1},
    ],
    "/v1/chat/completions": [
        CHAT,
        {**CHAT, "logprobs": True, "top_logprobs": 2, "logprob_token_ids": [7], "stream": True, "vllm_xargs": {"a": 1}},
        {**CHAT, "messages": [{"role": "user", "content": [{"type": "text", "text": "a"}]}], "tools": [], "user": "u"},
        {**CHAT, "chat_template": "{{ messages[0].content }}", "chat_template_kwargs": {"a": [1]}, "cache_salt": "s"},
    ],
    "/generative_scoring": [
        SCORING,
        {**SCORING, "query": [70], "items": [[71], "a"], "labels": None, "label_token_ids": [7, [8, 9]]},
        {**SCORING, "apply_softmax": False, "item_first": True, "truncate_prompt_tokens": 4},
    ],
    "/v1/score": [SCORING, {**SCORING, "items": "a", "cache_salt": "s"}],
    "/v1/decisions": [
        DECISION,
        {
            **DECISION,
            "input": [
                {"role": "developer", "content": "a"},
                {"role": "user", "content": [{"type": "input_json", "data": {"a": [1]}}]},
                {"type": "function_call", "call_id": "1", "name": "f", "arguments": "{}"},
                {"type": "function_call_output", "call_id": "1", "output": [{"type": "input_text", "text": "b"}]},
            ],
            "truncate_prompt_tokens": -1,
            "permutations": 2,
            "diagnostics": True,
            "return_token_ids": True,
        },
        {
            **DECISION,
            "questions": [
                {"type": "choice", "instructions": "", "choices": [{"value": True}, {"value": "true"}], "name": "n"},
                {"type": "score", "instructions": "", "levels": [{"label": "a"}, {"label": "b", "description": "c"}]},
            ],
            "read": "values",
            "calibration": {"temperature": 2.0, "bias": {"true": 1.0}},
            "prompt_cache_options": {"mode": "explicit"},
        },
    ],
    "/v1/systemone": [
        SYSTEM_ONE,
        {
            **SYSTEM_ONE,
            "state": {"a": [1, None]},
            "instructions": "b",
            "questions": {
                "q": {"type": "choice", "criteria": {"a": None, "b": "c"}},
                "r": {"type": "score", "criteria": ["a", "b"]},
            },
        },
    ],
    "/v1/responses": [
        RESPONSE,
        {
            **RESPONSE,
            "stream": True,
            "include": ["message.output_text.logprobs"],
            "top_logprobs": 2,
            "metadata": {"a": "b"},
        },
        {
            **RESPONSE,
            "input": [
                {"role": "developer", "content": "a"},
                {"role": "user", "content": [{"type": "input_text", "text": "b"}]},
                {"type": "reasoning", "id": "r", "summary": [], "content": [{"type": "reasoning_text", "text": "c"}]},
                {"type": "function_call", "call_id": "1", "name": "f", "arguments": "{}"},
                {"type": "function_call_output", "call_id": "1", "output": [{"type": "input_text", "text": "b"}]},
            ],
            "instructions": "d",
            "truncation": "auto",
            "text": {"format": {"type": "text"}, "verbosity": "medium"},
            "reasoning": {"effort": "low", "summary": "auto"},
            "logprob_token_ids": [7],
        },
    ],
    "/v1/responses/input_tokens": [RESPONSE],
    "/v1/messages": [
        MESSAGE,
        {**MESSAGE, "stream": True, "logprobs": True, "top_logprobs": 2, "stop_sequences": ["x"]},
        {
            **MESSAGE,
            "system": [{"type": "text", "text": "a", "cache_control": {"type": "ephemeral"}}],
            "messages": [
                {"role": "user", "content": [{"type": "text", "text": "a"}]},
                {
                    "role": "assistant",
                    "content": [
                        {"type": "thinking", "thinking": "b", "signature": ""},
                        {"type": "tool_use", "id": "1", "name": "f", "input": {"a": [1]}},
                    ],
                },
                {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "1", "content": "c"}]},
            ],
            "thinking": {"type": "adaptive"},
            "output_config": {"effort": "low"},
            "labels": ["a"],
        },
    ],
    "/v1/messages/count_tokens": [{**MESSAGE, "max_tokens": None}],
    "/v1/conversations": [{"items": [{"role": "user", "content": "a"}], "metadata": {"a": "b"}}],
    "/tokenize": [TOKENIZE, {"messages": CHAT["messages"], "return_token_strs": True}],
    "/detokenize": [DETOKENIZE],
}

NAMED = {"/v1/responses": ("response.completed", "response.incomplete"), "/v1/messages": ("message_stop",)}
"""Streams whose last event has a type, by what that is."""

ODD = [
    None, True, False, 0, 1, -1, 2, 7, 0.0, -0.5, 1.5, 1e-9, 1e30, 1e308, 2**31, 2**63, -(2**70), float("nan"),
    float("inf"), "", "a", "ab", "\0", "é😀", SURROGATE, "x" * 5000, "{{ 1 }}", "../..", [], [[]], [None], [7, "a"],
    ["a", 7], [0] * 50, [[7], [8]], {}, {"": 1}, {"a": {"b": [1]}}, {SURROGATE: SURROGATE},
]  # fmt: skip


@cache
def names():
    """All fields, of the models that routers have declared once there is an application."""
    return sorted({name for model in REQUEST_MODELS for name in (*model.model_fields, *model.ACCEPTED, *model.REFUSED)})


@pytest.fixture(scope="module")
def server(serve: Serve) -> AppThread:
    caps = {"max_model_len": MAX_MODEL_LEN, "max_logprobs": MAX_LOGPROBS, "max_logprob_token_ids": MAX_IDS}
    template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    app = serve({**caps, "max_num_seqs": 4}, chat_template=template, max_num_queued_reqs=12, max_body_mib=0.1)
    app.expected = choices(app)
    return app


def choices(server):
    return server.post("/v1/completions", **{**COMPLETION, "temperature": 0, "logprobs": 1})["choices"]


def mutated(random_, body):
    """The body with a few parts replaced, removed, doubled or added."""
    body = copy.deepcopy(body)
    for _ in range(random_.choice((1, 1, 1, 2, 3))):
        places = list(walk(body))
        parent, key = random_.choice(places)
        action = random_.random()
        if action < 0.2:
            body[random_.choice(names())] = copy.deepcopy(random_.choice(ODD))
        elif action < 0.3:
            del parent[key]
        elif action < 0.45 and isinstance(parent, list):
            parent.extend(copy.deepcopy(parent) * random_.choice((1, 5)))
        elif action < 0.6:
            parent[key] = random_.choice(([parent[key]], {"a": parent[key]}, str(parent[key]), [parent[key]] * 20))
        elif action < 0.75 and isinstance(parent[key], (int, float)):
            parent[key] = parent[key] * random_.choice((-1, 2, 1000, 0.5)) + random_.choice((-1, 0, 1))
        else:
            parent[key] = copy.deepcopy(random_.choice(ODD))
        if not body:
            break
    return body


def walk(value):
    """(list or object, place in it) of everything within a value."""
    entries = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, each in list(entries):
        yield value, key
        yield from walk(each)


def damaged(random_, data):
    """The bytes with a few of them changed, removed or doubled."""
    data = bytearray(data)
    for _ in range(random_.randint(1, 4)):
        start = random_.randrange(len(data))
        end = start + random_.choice((1, 1, 2, 10))
        other = bytes(random_.choices(range(256), k=random_.randint(0, 3)))
        data[start:end] = random_.choice((other, b"", data[start:end] * 3, b'"', b"}", b"9" * 30, b"\\ud800"))
        data = data or bytearray(b"{")
    return bytes(data)


def check(server, path, content):
    """Send it; the status, after a look at the answer's shape."""
    headers = {"Content-Type": "application/json"}
    answer = server.request("POST", path, content=content, headers=headers)
    assert answer.status_code in (200, 400, 404, 413, 429), answer.text
    if answer.headers["content-type"].startswith("text/event-stream"):
        *events, done = [event.rpartition("data: ")[2] for event in answer.text.strip().split("\n\n")]
        if path in NAMED:
            assert json.loads(done)["type"] in NAMED[path]
        else:
            assert done == "[DONE]"
            assert all("error" not in json.loads(event) for event in events)
    elif answer.status_code == 200:
        assert not answer.json().get("error")
    else:
        assert set(answer.json()) - {"type"} == {"error"}
        error = answer.json()["error"]
        # Clients of /v1/messages read there which feature a refusal is about.
        details = {"details"} if path.startswith("/v1/messages") else set()
        assert set(error) - details == {"message", "type", "param", "code"}
        assert error["message"]
        assert error["type"]
        assert error["code"]
    return answer.status_code


@pytest.mark.parametrize("path", GOOD)
def test_mutated_bodies(server, path):
    statuses = run(
        server, path, [json.dumps(mutated(r, r.choice(GOOD[path]))).encode() for r in randoms(path, NUM_BODIES)]
    )
    # Mutations that are all refused at the same door would try nothing.
    assert statuses.count(200) > NUM_BODIES // 20
    assert statuses.count(400) > NUM_BODIES // 4


@pytest.mark.parametrize("path", GOOD)
def test_damaged_bytes(server, path):
    statuses = run(
        server, path, [damaged(r, json.dumps(r.choice(GOOD[path])).encode()) for r in randoms(path, NUM_BYTES)]
    )
    assert statuses.count(400) > NUM_BYTES // 2


@pytest.mark.parametrize("path", GOOD)
def test_random_bytes(server, path):
    bodies = [bytes(r.choices(range(256), k=r.randint(0, 40))) for r in randoms(path, 30)]
    assert set(run(server, path, bodies)) == {400}


@pytest.mark.parametrize("path", GOOD)
def test_good_bodies(server, path):
    """The mutants' parents are no mutants."""
    assert set(run(server, path, [json.dumps(body).encode() for body in GOOD[path]])) == {200}


def randoms(path, count):
    """Generators that are the same in every run."""
    return [random.Random(f"{path} {index}") for index in range(count)]


def run(server, path, bodies):
    """The statuses of all; afterwards the server is as it was."""
    statuses = []
    for body in bodies:
        try:
            statuses.append(check(server, path, body))
        except AssertionError as error:
            raise AssertionError(f"{body[:2000]!r}: {error}") from None
        assert server.engine.num_unfinished_requests == len(server.state.in_flight) == 0, body[:2000]
    assert choices(server) == server.expected
    return statuses
