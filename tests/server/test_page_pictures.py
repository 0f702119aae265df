"""The page at / takes a dropped picture, and shows the labels' probabilities behind it."""

from __future__ import annotations

import base64
import json
import os
import subprocess
from collections.abc import Iterator

import httpx
import pytest
from live_server import LiveServer
from pictures import data_url, drawn, file_of
from test_page import FOLDER, KEY, check_bars, find_tools, post, whole
from tiny_vision import make_chat_model

IMAGE = drawn(40, 30, 1)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    folder = tmp_path_factory.mktemp("vision")
    make_chat_model("llava", folder, ">")
    with LiveServer(folder, "--max-model-len", "400", "--api-key", KEY) as server:
        yield server


def test_models_say_whether_they_read_pictures(server: LiveServer) -> None:
    answer = httpx.get(f"{server.url}/v1/models", headers={"Authorization": f"Bearer {KEY}"})
    assert answer.json()["models"][0]["capabilities"] == ["completion", "multimodal"]


def test_a_dropped_picture(server: LiveServer) -> None:
    tools = find_tools()
    command = [tools.pop("node"), str(FOLDER / "page.mjs")]
    picture = base64.b64encode(file_of(IMAGE)).decode()
    env = {**os.environ, **tools, "PAGE_URL": server.url, "PAGE_KEY": KEY, "PAGE_PICTURE": picture}
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=150)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)["pictures"]
    assert "failed" not in found, f"{found['failed']}\n{found['log']}"
    assert found["log"]["complaints"] == [] and found["log"]["hosts"] == [server.url.removeprefix("http://")]
    assert found["completion"] and found["names"] == ["first.png", "other.png"] and found["drawn"]
    chat, decision = found["log"]["bodies"]
    url = {"type": "image_url", "image_url": {"url": data_url(IMAGE)}}
    assert chat["messages"] == [{"role": "user", "content": [url, {"type": "text", "text": "what"}]}]
    answer = post(server, "v1/chat/completions", whole(chat))
    check_bars(found["bars"], answer, 0)
    # Another picture has others.
    url["image_url"]["url"] = data_url(drawn(24, 50, 2))
    other = post(server, "v1/chat/completions", {**whole(chat), "messages": [{"role": "user", "content": [url]}]})
    assert other["choices"][0]["readings"] != answer["choices"][0]["readings"]
    assert found["said"] == "[picture] what" and found["left"] == 0 and "data:image/png;base64," in found["code"]
    assert decision["input"][0]["content"][0] == {"type": "input_image", "image_url": data_url(IMAGE)}
    share = post(server, "v1/decisions", decision)["answers"][0]["probability"]
    assert f"{100 * share:.2f} %" in found["answers"]
