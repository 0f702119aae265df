"""Requests as upstream's clients send them: names of the model, fields, parts of messages, rendered prompts."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from asgi import AppThread, client_of, make_engine
from tiny_llm import make_tiny_model

pytestmark = pytest.mark.usefixtures("engines_of_one_thread")

TEMPLATE = "{% for message in messages %}<{{ message.role }}>{{ message.content }}{% endfor %}"
CHAT = {"messages": [{"role": "user", "content": "hi"}], "chat_template": TEMPLATE, "max_tokens": 2, "temperature": 0}
COMPLETION = {"prompt": "hi", "max_tokens": 2, "temperature": 0}
PATHS = {"/v1/chat/completions": CHAT, "/v1/completions": COMPLETION}


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("Org") / "Small")


@pytest.fixture(scope="module")
def server(folder) -> Iterator[AppThread]:
    with AppThread(make_engine(folder), served_model_name=None, access_log=False) as app:
        yield app


def with_args(server: AppThread, method: str, path: str, body: Any = None, **args: Any) -> httpx.Response:
    """One request to another server over the same engine."""

    async def send() -> httpx.Response:
        async with client_of(server.engine, **{"access_log": False, "served_model_name": None, **args}) as client:
            return await client.request(method, path, json=body)

    return server.run(send())


@pytest.mark.parametrize("path", PATHS)
def test_the_model_is_served_under_the_name_as_given(server, folder, path):
    names = [each["id"] for each in server.request("GET", "/v1/models").json()["data"]]
    assert names == [str(folder)]
    for name in (str(folder), "Small", None):
        answer = server.request("POST", path, json={"model": name, **PATHS[path]})
        assert (answer.status_code, answer.json()["model"]) == (200, str(folder))
    assert server.request("POST", path, json=PATHS[path]).json()["model"] == str(folder)
    assert server.request("POST", path, json={"model": "Other/Small", **PATHS[path]}).status_code == 404
    assert server.request("GET", f"/v1/models/{folder}").json()["id"] == str(folder)


def test_of_several_names_the_first_stands_in_answers(server):
    names = {"served_model_name": ["a", "Org/b"]}
    listed = with_args(server, "GET", "/v1/models", **names).json()["data"]
    assert [each["id"] for each in listed] == ["a", "Org/b"]
    for name in ("a", "Org/b"):
        assert with_args(server, "POST", "/v1/completions", {"model": name, **COMPLETION}, **names).json()["model"] == "a"
    for name in ("b", "Small", str(server.engine.model_config.model)):
        answer = with_args(server, "POST", "/v1/completions", {"model": name, **COMPLETION}, **names)
        assert (answer.status_code, answer.json()["error"]["param"]) == (404, "model")
