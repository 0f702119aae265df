"""The scoring endpoints' refusals, by field; nothing of a refused request stays in the engine."""

from __future__ import annotations

import json

import pytest
from asgi import AppThread, Serve, client_of
from byte_tokenizer import VOCAB_SIZE

from vllm import SamplingParams
from vllm.server.serving.labels.item_scores import MAX_READINGS

PATHS = pytest.mark.parametrize("path", ["/generative_scoring", "/v1/score"])
GOOD = {"query": "the ", "items": ["cat", "stop"], "label_token_ids": [5, 6]}
WITHOUT = object()

# (changed fields, status, param, a part of the message)
BAD = [
    ({"model": "other"}, 404, "model", "there is no model 'other'"),
    ({"model": 5}, 400, "model", "model"),
    ({"query": WITHOUT}, 400, "query", "query is required"),
    ({"query": None}, 400, "query", "must be a string or a list of token ids"),
    ({"query": 5}, 400, "query", "must be a string or a list of token ids"),
    ({"query": {"text": "a"}}, 400, "query", "must be a string or a list of token ids"),
    ({"query": [5, "a"]}, 400, "query", "query must hold integers, got str 'a'"),
    ({"query": [5, 6.0]}, 400, "query", "must hold integers"),
    ({"query": [True]}, 400, "query", "must hold integers, got bool"),
    ({"query": [-1]}, 400, "query", "query must not be negative, got -1"),
    ({"query": [VOCAB_SIZE]}, 400, "query", f"query must be in [0, {VOCAB_SIZE})"),
    ({"query": [10**400]}, 400, "query", "query must be in"),
    ({"query": "a\ud800"}, 400, "query", "lone surrogate"),
    ({"items": WITHOUT}, 400, "items", "items is required"),
    ({"items": []}, 400, "items", "items must not be empty"),
    ({"items": None}, 400, "items", "items must be a list"),
    ({"items": {"a": 1}}, 400, "items", "items must be a list"),
    ({"items": [5]}, 400, "items", "items[0] must be a string or a list of token ids"),
    ({"items": ["a", [VOCAB_SIZE]]}, 400, "items", "items[1] must be in"),
    ({"items": ["a", [[5]]]}, 400, "items", "items[1] must hold integers"),
    ({"items": ["a", "\udfff"]}, 400, "items", "items[1] holds a lone surrogate"),
    ({"items": ["a", ""], "query": ""}, 400, "items", "items[1]: the prompt is empty"),
    ({"items": ["x" * 200]}, 400, "items", "items[0] makes a prompt of 202 tokens"),
    ({"items": ["a"] * 9}, 400, "items", "items has 9 entries, more than the limit of 8"),
    ({"label_token_ids": WITHOUT}, 400, "label_token_ids", "label_token_ids or labels is required"),
    ({"label_token_ids": None}, 400, "label_token_ids", "label_token_ids or labels is required"),
    ({"labels": ["a"]}, 400, "labels", "exclude each other"),
    ({"label_token_ids": []}, 400, "label_token_ids", "label_token_ids must not be empty"),
    ({"label_token_ids": 5}, 400, "label_token_ids", "label_token_ids must be a list"),
    ({"label_token_ids": ["7"]}, 400, "label_token_ids", "must be a list of token ids"),
    ({"label_token_ids": [5.0]}, 400, "label_token_ids", "must hold integers, got float"),
    ({"label_token_ids": [True]}, 400, "label_token_ids", "must hold integers, got bool"),
    ({"label_token_ids": [-5]}, 400, "label_token_ids", "must not be negative, got -5"),
    ({"label_token_ids": [-(10**400)]}, 400, "label_token_ids", "must not be negative"),
    ({"label_token_ids": [VOCAB_SIZE]}, 400, "label_token_ids", f"label_token_ids must be in [0, {VOCAB_SIZE})"),
    ({"label_token_ids": [5, [5]]}, 400, "label_token_ids", "are the same tokens"),
    ({"label_token_ids": [[]]}, 400, "label_token_ids", "has no token"),
    ({"label_token_ids": [[5] * 200]}, 400, "label_token_ids", "a label of 200 tokens is longer than the context"),
    ({"label_token_ids": WITHOUT, "labels": []}, 400, "labels", "labels must not be empty"),
    ({"label_token_ids": WITHOUT, "labels": "yes"}, 400, "labels", "labels must be a list of strings"),
    ({"label_token_ids": WITHOUT, "labels": [5]}, 400, "labels", "labels must be a list of strings"),
    ({"label_token_ids": WITHOUT, "labels": [""]}, 400, "labels", "empty string"),
    ({"label_token_ids": WITHOUT, "labels": ["a", "a"]}, 400, "labels", "are the same tokens"),
    ({"label_token_ids": WITHOUT, "labels": ["\ud800"]}, 400, "labels", "lone surrogate"),
    ({"label_token_ids": [[a, b] for a in range(40) for b in (1, 2)]}, 400, "label_token_ids", "80 sequences"),
    ({"label_token_ids": [5] * (MAX_READINGS // 2 + 1)}, 400, "label_token_ids", f"the limit of {MAX_READINGS}"),
    ({"apply_softmax": 1}, 400, "apply_softmax", "apply_softmax"),
    ({"item_first": "yes"}, 400, "item_first", "item_first"),
    ({"add_special_tokens": []}, 400, "add_special_tokens", "add_special_tokens"),
    ({"truncate_prompt_tokens": 0}, 400, "truncate_prompt_tokens", "must be between 1 and 128, got 0"),
    ({"truncate_prompt_tokens": -2}, 400, "truncate_prompt_tokens", "must be between 1 and 128"),
    ({"truncate_prompt_tokens": 129}, 400, "truncate_prompt_tokens", "must be at most 128"),
    ({"truncate_prompt_tokens": 10**30}, 400, "truncate_prompt_tokens", "must be at most 128"),
    ({"truncate_prompt_tokens": 5.5}, 400, "truncate_prompt_tokens", "truncate_prompt_tokens"),
    ({"cache_salt": ""}, 400, "cache_salt", "cache_salt"),
    ({"cache_salt": 5}, 400, "cache_salt", "cache_salt"),
    ({"cache_salt": "\ud800"}, 400, "cache_salt", "cache_salt must be"),
    ({"priority": 2**63}, 400, "priority", "priority must be at most"),
    ({"priority": "high"}, 400, "priority", "priority"),
    ({"request_id": ""}, 400, "request_id", "request_id"),
    ({"label_ids": [5]}, 400, "label_ids", "did you mean 'labels'"),
    ({"max_tokens": 5}, 400, "max_tokens", "unknown field 'max_tokens'"),
]


@pytest.fixture(scope="module")
def server(serve: Serve) -> AppThread:
    """One that takes 8 items, and 24 sequences at a time."""
    return serve({"max_num_seqs": 16}, max_prompts_per_request=8, max_num_queued_reqs=8)


@pytest.fixture
def nothing_stays(server):
    """The server answers as before, and holds nothing of what it refused."""
    yield
    server.post("/generative_scoring", **GOOD)
    assert server.engine.num_unfinished_requests == 0
    assert not server.run(server.engine.replicas[0].core.call("has_unfinished_requests"))


@PATHS
@pytest.mark.parametrize(("changes", "status", "param", "message"), BAD)
def test_a_bad_field(server, nothing_stays, path, changes, status, param, message):
    body = {name: value for name, value in {**GOOD, **changes}.items() if value is not WITHOUT}
    response = server.request("POST", path, content=json.dumps(body), headers={"Content-Type": "application/json"})
    error = response.json()["error"]
    assert (response.status_code, error["param"]) == (status, param), error
    assert message in error["message"]
    assert set(error) == {"message", "type", "param", "code"} and error["code"]


@PATHS
def test_a_full_queue(server, nothing_stays, path):
    long = SamplingParams(max_tokens=100, ignore_eos=True, n=16)

    async def run():
        engine = server.engine
        streams = [await engine.add_request(f"long-{i}", "a", long) for i in range(2)]
        # 32 sequences are there, more than the server itself would take.
        async with client_of(engine, max_num_queued_reqs=8) as client:
            response = await client.post(path, json=GOOD)
        await engine.abort([stream.request_id for stream in streams])
        return response

    response = server.run(run())
    assert response.status_code == 429 and response.headers["Retry-After"]
    assert response.json()["error"]["code"] == "overloaded"


@PATHS
def test_a_server_that_stops(server, nothing_stays, path):
    server.state.draining = True
    try:
        response = server.request("POST", path, json=GOOD)
    finally:
        server.state.draining = False
    assert response.status_code == 503 and response.headers["Retry-After"]
