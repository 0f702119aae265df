"""/v1/chat/completions/batch and /invocations: bodies of other shapes, the same answers."""

from __future__ import annotations

from typing import Any

import pytest
from asgi import AppThread

TEMPLATE = "{% for message in messages %}<{{ message.role }}>{{ message.content }}{% endfor %}"
FIELDS = {"chat_template": TEMPLATE, "max_tokens": 3, "temperature": 0}
CHATS = [[{"role": "user", "content": text}] for text in ("hi", "stop the", "hi")]


def error(server: AppThread, path: str, **body: Any) -> dict[str, Any]:
    response = server.request("POST", path, json={"model": "tiny", **body})
    assert response.status_code == 400, response.text
    return response.json()["error"]


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"logprobs": True, "top_logprobs": 2, "logprob_token_ids": [5, 9], "return_token_ids": True},
        {"max_tokens": 0},
    ],
)
def test_a_batch_is_its_conversations_one_by_one(server, fields):
    fields = FIELDS | fields
    batch = server.post("/v1/chat/completions/batch", messages=CHATS, **fields)
    alone = [server.post("/v1/chat/completions", messages=each, **fields) for each in CHATS]
    assert [choice["index"] for choice in batch["choices"]] == [0, 1, 2]
    for choice, one in zip(batch["choices"], alone, strict=True):
        assert choice == {**one["choices"][0], "index": choice["index"], **_of_prompt(one)}
    for name in ("prompt_tokens", "completion_tokens", "total_tokens"):
        assert batch["usage"][name] == sum(one["usage"][name] for one in alone)
    assert (batch["object"], batch["model"]) == ("chat.completion", "tiny")


def _of_prompt(answer: dict[str, Any]) -> dict[str, Any]:
    return {name: answer[name] for name in ("prompt_token_ids", "prompt_logprobs") if answer.get(name) is not None}


def test_choices_of_several_samples_follow_each_other(server):
    fields = FIELDS | {"n": 2, "temperature": 1, "seed": 7}
    batch = server.post("/v1/chat/completions/batch", messages=CHATS[:2], **fields)
    alone = [server.post("/v1/chat/completions", messages=each, **fields)["choices"] for each in CHATS[:2]]
    assert [choice["index"] for choice in batch["choices"]] == [0, 1, 2, 3]
    wanted = [choice["message"]["content"] for one in alone for choice in one]
    assert [choice["message"]["content"] for choice in batch["choices"]] == wanted


def test_bad_batches_name_the_field(server):
    path = "/v1/chat/completions/batch"
    for messages in ([], [[]], [CHATS[0], []], CHATS[0], [CHATS[0], "hi"], "hi", None):
        assert error(server, path, messages=messages, **FIELDS)["param"] == "messages"
    assert error(server, path, messages=CHATS, stream=True, **FIELDS)["param"] == "stream"
    assert error(server, path, messages=CHATS, **{**FIELDS, "temperature": -1})["param"] == "temperature"
    assert "--max-prompts-per-request" in error(server, path, messages=[CHATS[0]] * 100_000, **FIELDS)["message"]


def test_invocations_are_chats_or_completions(server):
    chat = {"messages": CHATS[0], **FIELDS}
    completion = {"prompt": "the", "max_tokens": 2, "temperature": 0, "logprob_token_ids": [5]}
    for path, body in (("/v1/chat/completions", chat), ("/v1/completions", completion)):
        answers = [server.post(each, **body) for each in ("/invocations", path)]
        assert answers[0]["choices"] == answers[1]["choices"] and answers[0]["object"] == answers[1]["object"]
    assert error(server, "/invocations", max_tokens=2)["param"] == "messages"
    assert error(server, "/invocations", **{**chat, **completion})["param"] == "prompt"
    assert error(server, "/invocations", prompt="the", max_tokens=-1)["param"] == "max_tokens"
    assert server.request("POST", "/invocations", json=["the"]).status_code == 400
    assert server.request("POST", "/invocations", json={"model": "other", "prompt": "the"}).status_code == 404
