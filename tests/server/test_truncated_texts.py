"""truncate_prompt_tokens of every route that takes texts: what the tokenizer puts around them stays."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from asgi import AppThread, Serve
from byte_tokenizer import BOS, EOS, VOCAB_SIZE, make_template_tokenizer
from models_util import make_random_model
from transformers import AutoTokenizer

TEXT, LONG = "a b c d e f", "0123456789" * 20
CHAT = "{% for m in messages %}{{ m.content }}{% endfor %}"
WRITES_BOS = "<s>" + CHAT
MESSAGES = [{"role": "user", "content": TEXT}]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("both")
    make_random_model("llama", "small", folder, vocab_size=VOCAB_SIZE)
    make_template_tokenizer(folder, "<s> $A </s>")
    return folder


@pytest.fixture(scope="module")
def server(serve: Serve, folder: Path) -> AppThread:
    return serve({}, folder)


@pytest.fixture(scope="module")
def pooling(serve: Serve, folder: Path) -> AppThread:
    return serve({"runner": "pooling"}, folder)


@pytest.fixture(scope="module")
def cut(folder):
    """A text's ids by transformers."""
    tokenizer = AutoTokenizer.from_pretrained(folder)

    def ids(text: str, limit: int, side: str = "left", **options: Any) -> list[int]:
        tokenizer.truncation_side = side
        return tokenizer(text, truncation=True, max_length=limit, **options)["input_ids"]

    return ids


GREEDY = {"max_tokens": 1, "temperature": 0, "return_token_ids": True}


def test_completions(server, cut):
    for limit in range(2, 14):
        choices = server.post("/v1/completions", prompt=[TEXT, LONG], truncate_prompt_tokens=limit, **GREEDY)["choices"]
        assert [choice["prompt_token_ids"] for choice in choices] == [cut(TEXT, limit), cut(LONG, limit)]
    (choice,) = server.post("/v1/completions", prompt=LONG, truncate_prompt_tokens=-1, **GREEDY)["choices"]
    assert choice["prompt_token_ids"] == cut(LONG, 127)
    (choice,) = server.post(
        "/v1/completions", prompt=TEXT, truncate_prompt_tokens=3, add_special_tokens=False, **GREEDY
    )["choices"]
    assert choice["prompt_token_ids"] == cut(TEXT, 3, add_special_tokens=False)
    (choice,) = server.post("/v1/completions", prompt=cut(TEXT, 99), truncate_prompt_tokens=3, **GREEDY)["choices"]
    assert choice["prompt_token_ids"] == cut(TEXT, 99)[-3:]


def test_an_echoed_text_is_that_of_the_tokens_that_are_left(server, cut):
    body = {"prompt": TEXT, "truncate_prompt_tokens": 3, "echo": True, "logprobs": 1, "max_tokens": 0}
    (choice,) = server.post("/v1/completions", **body)["choices"]
    assert choice["logprobs"]["token_ids"] == cut(TEXT, 3)
    assert choice["text"] == "<s>f</s>"


@pytest.mark.parametrize(
    ("template", "special", "expected"),
    [
        (CHAT, True, lambda cut: cut(TEXT, 3)),
        (CHAT, None, lambda cut: cut(TEXT, 3, add_special_tokens=False)),
        (CHAT, False, lambda cut: cut(TEXT, 3, add_special_tokens=False)),
        # A template writes text.
        (WRITES_BOS, None, lambda cut: cut(TEXT, 3, add_special_tokens=False)),
        (WRITES_BOS, True, lambda cut: cut(TEXT, 3)),
    ],
)
def test_chat(server, cut, template, special, expected):
    body = {"messages": MESSAGES, "chat_template": template, "add_special_tokens": special, **GREEDY}
    answer = server.post("/v1/chat/completions", truncate_prompt_tokens=3, **body)
    found = answer.get("prompt_token_ids") or answer["choices"][0]["prompt_token_ids"]
    assert found == expected(cut)
    rendered = server.post("/v1/chat/completions/render", truncate_prompt_tokens=3, **body)
    assert rendered["token_ids"] == expected(cut)


def test_ids_of_generate_are_cut_at_their_beginning(server):
    ids = [BOS, *range(5, 15), EOS]
    sampling = {"truncate_prompt_tokens": 3, "max_tokens": 1}
    answer = server.post("/inference/v1/generate", token_ids=ids, sampling_params=sampling, return_token_ids=True)
    assert answer["prompt_token_ids"] == ids[-3:]


def test_fewer_than_the_special_tokens(server, pooling):
    for own, path, body in (
        (server, "/v1/completions", {"prompt": TEXT}),
        (pooling, "/v1/embeddings", {"input": TEXT}),
    ):
        answer = own.request("POST", path, json={"model": "tiny", "truncate_prompt_tokens": 1, **body})
        error = answer.json()["error"]
        assert (answer.status_code, error["param"]) == (400, "truncate_prompt_tokens")
        assert "no room for the 2 special tokens" in error["message"]


def embedding(server, path, **body):
    (entry,) = server.post(path, **body)["data"]
    return np.array(entry.get("embedding", entry.get("data")))


@pytest.mark.parametrize("path", ["/v1/embeddings", "/pooling"])
@pytest.mark.parametrize("side", [None, "right", "left"])
def test_embeddings(pooling, cut, path, side):
    for limit, text in ((3, TEXT), (6, TEXT), (-1, LONG)):
        ids = cut(text, 128 if limit == -1 else limit, side or "right")
        found = embedding(pooling, path, input=text, truncate_prompt_tokens=limit, truncation_side=side)
        np.testing.assert_allclose(found, embedding(pooling, path, input=ids), atol=1e-6)
    plain = {"add_special_tokens": False, "truncate_prompt_tokens": 3, "truncation_side": side}
    ids = cut(TEXT, 3, side or "right", add_special_tokens=False)
    np.testing.assert_allclose(
        embedding(pooling, path, input=TEXT, **plain), embedding(pooling, path, input=ids), atol=1e-6
    )


def test_a_special_token_that_a_text_spells_is_text(pooling, cut):
    """It is not taken for the one that the tokenizer puts at the end."""
    text = "a b c d </s>"
    found = embedding(pooling, "/v1/embeddings", input=text, truncate_prompt_tokens=3, add_special_tokens=False)
    ids = cut(text, 3, "right", add_special_tokens=False)
    np.testing.assert_allclose(found, embedding(pooling, "/pooling", input=ids), atol=1e-6)


def test_pairs_of_embeddings(pooling, cut):
    body = {"text_1": TEXT, "text_2": [LONG], "truncate_prompt_tokens": 4}
    (entry,) = pooling.post("/score", **body)["data"]
    one, other = (embedding(pooling, "/pooling", input=cut(text, 4, "right")) for text in (TEXT, LONG))
    assert entry["score"] == pytest.approx(float(one @ other), abs=1e-5)
    (result,) = pooling.post("/rerank", query=TEXT, documents=[LONG], truncate_prompt_tokens=4)["results"]
    assert result["relevance_score"] == pytest.approx(entry["score"], abs=1e-6)
