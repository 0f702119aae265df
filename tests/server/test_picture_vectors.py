"""/v1/embeddings of a model that makes vectors of texts and of pictures: both come as messages."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from asgi import AppThread, Serve
from pictures import data_url, drawn
from tiny_pairs import make_pair, reference

pytestmark = pytest.mark.usefixtures("one_thread")

PICTURE = drawn(40, 30, 1)
IMAGE = {"type": "image_url", "image_url": {"url": data_url(PICTURE)}}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("pair")


@pytest.fixture(scope="module")
def made(folder: Path) -> Any:
    return make_pair("clip", folder)


@pytest.fixture(scope="module")
def server(serve: Serve, folder: Path, made: Any) -> AppThread:
    return serve({"max_model_len": 16}, folder)


def by_messages(server: AppThread, *parts: Any) -> np.ndarray:
    content = list(parts) if len(parts) > 1 or isinstance(parts[0], dict) else parts[0]
    answer = server.post("/v1/embeddings", messages=[{"role": "user", "content": content}])
    return np.array(answer["data"][0]["embedding"])


def test_texts_and_pictures(server: AppThread, made: Any) -> None:
    for item, content in ((PICTURE, IMAGE), ("a photo of a cat", "a photo of a cat")):
        want = reference(*made, item)
        np.testing.assert_allclose(by_messages(server, content), want / np.linalg.norm(want), atol=1e-4)
    (text,) = server.post("/v1/embeddings", input="a photo of a cat")["data"]
    np.testing.assert_allclose(text["embedding"], by_messages(server, "a photo of a cat"), atol=1e-6)


@pytest.mark.parametrize("content", [[{"type": "text", "text": "a cat"}, IMAGE], [IMAGE, IMAGE]])
def test_a_prompt_is_a_text_or_a_picture(server: AppThread, content: Any) -> None:
    response = server.request("POST", "/v1/embeddings", json={"messages": [{"role": "user", "content": content}]})
    message = response.json()["error"]["message"]
    assert response.status_code == 400 and "a text or of one picture, not of both" in message
