"""A server whose engine sleeps, or of which a part was woken: requests wait for /wake_up, all else answers."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from asgi import AppThread, Serve
from bad_bodies import CHAT, COMPLETION, DECISION, DETOKENIZE, MESSAGE, RESPONSE, SCORING, SYSTEM_ONE, TOKENIZE

GREEDY = {"temperature": 0, "ignore_eos": True}
TEMPLATE = {"chat_template": "{{ messages[0].content }}"}
PAIRS = {"model": "tiny", "query": "ab", "documents": ["c", "d"]}
TEXTS = {"model": "tiny", "input": ["ab", "c"]}
COHERE = {"model": "tiny", "texts": ["ab", "c"], "input_type": "search_document"}
# Requests that need the model, where it can do what they ask for.
REQUESTS: dict[str, dict[str, Any]] = {
    "/v1/completions": {**COMPLETION, **GREEDY},
    "/v1/chat/completions": {**CHAT, **GREEDY, **TEMPLATE},
    "/v1/chat/completions/batch": {**CHAT, **GREEDY, **TEMPLATE, "messages": [CHAT["messages"]]},
    "/inference/v1/generate": {"token_ids": [5, 6], "sampling_params": {"max_tokens": 1, **GREEDY}},
    "/invocations": {**COMPLETION, **GREEDY},
    "/v1/responses": {**RESPONSE, **GREEDY, **TEMPLATE},
    "/v1/messages": {**MESSAGE, **GREEDY, **TEMPLATE},
    "/rerank": PAIRS,
    "/v1/rerank": PAIRS,
    "/v2/rerank": PAIRS,
    "/generative_scoring": SCORING,
    "/v1/score": SCORING,
    "/score": SCORING,
    "/v1/decisions": DECISION,
    "/v1/systemone": SYSTEM_ONE,
    "/v1/embeddings": TEXTS,
    "/embeddings": TEXTS,
    "/v2/embed": COHERE,
    "/v1/embed": COHERE,
    "/embed": TEXTS,
    "/classify": TEXTS,
    "/pooling": TEXTS,
}
ANSWERING: dict[str, dict[str, Any] | None] = {
    "/inference/v1/abort_requests": {"request_ids": ["unknown"]},
    "/v1/completions/render": COMPLETION,
    "/v1/chat/completions/render": {**CHAT, **TEMPLATE},
    "/v1/responses/input_tokens": {**RESPONSE, **TEMPLATE},
    "/v1/responses/{response_id}": None,
    "/v1/responses/{response_id}/input_items": None,
    "/v1/responses/{response_id}/cancel": {},
    "/v1/conversations": {},
    "/v1/messages/count_tokens": {"model": "tiny", "messages": MESSAGE["messages"], **TEMPLATE},
    "/tokenize": TOKENIZE,
    "/detokenize": DETOKENIZE,
    "/tokenizer_info": None,
    "/v1/models": None,
    "/v1/models/{model}": None,
    "/version": None,
    "/ping": None,
    "/health": None,
    "/load": None,
    "/metrics": None,
}
SECONDS = 60


@pytest.fixture(scope="module", params=["generate", "pooling"])
def app(request: pytest.FixtureRequest, serve: Serve) -> Iterator[AppThread]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_SERVER_DEV_MODE", "1")
        yield serve({"runner": request.param})


def content(answer: Any) -> Any:
    """The answer without the request's own: no id, no time."""
    if isinstance(answer, list):
        return [content(each) for each in answer]
    if not isinstance(answer, dict):
        return answer
    varying = ("id", "created", "created_at", "completed_at", "usage", "request_id")
    return {name: content(value) for name, value in answer.items() if name not in varying}


def test_no_route_is_forgotten(app: AppThread) -> None:
    assert set(app.request("GET", "/openapi.json").json()["paths"]) <= {*REQUESTS, *ANSWERING}


@pytest.mark.parametrize("level", [1, 2])
def test_every_route(app: AppThread, level: int) -> None:
    awake = {path: app.request("POST", path, json=body) for path, body in REQUESTS.items()}

    async def send(path: str) -> httpx.Response:
        body, client, url = ANSWERING[path], app._client, path.format(model="tiny", response_id="resp_unknown")
        return await (client.get(url) if body is None else client.post(url, json=body))

    assert sum(answer.status_code == 200 for answer in awake.values()) > 5

    others = {path: app.run(send(path)).status_code for path in ANSWERING}
    assert others["/health"] == others["/tokenize"] == 200

    async def while_asleep(url: str) -> None:
        client = app._client
        assert (await client.post(url)).status_code == 200
        coming = {path: asyncio.create_task(client.post(path, json=body)) for path, body in REQUESTS.items()}
        refused = [task for path, task in coming.items() if awake[path].status_code != 200]
        await asyncio.wait_for(asyncio.gather(*refused), SECONDS)
        for path in ANSWERING:
            assert (await asyncio.wait_for(send(path), SECONDS)).status_code == others[path], path
        assert not any(task.done() for task in coming.values() if task not in refused)
        assert (await client.post("/wake_up")).status_code == 200
        for path, task in coming.items():
            answer = await asyncio.wait_for(task, SECONDS)
            assert answer.status_code == awake[path].status_code, path
            assert content(answer.json()) == content(awake[path].json()), path

    app.run(while_asleep(f"/sleep?level={level}"))
    app.request("POST", f"/sleep?level={level}")
    app.run(while_asleep("/wake_up?tags=weights"))
