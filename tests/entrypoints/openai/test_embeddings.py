"""/v1/embeddings: an encoder's vectors as LLM.embed gives them, by the openai SDK too."""

from __future__ import annotations

import base64

import numpy as np
import pytest
from asgi import AppThread, make_engine
from minilm import extract_minilm
from openai import AsyncOpenAI
from tiny_llm import make_tiny_model

from vllm import LLM, PoolingParams

TEXTS = ["The cat sits on the mat.", "A kitten is on a rug.", "Stocks fell."]


@pytest.fixture(scope="module")
def minilm(tmp_path_factory):
    return extract_minilm(tmp_path_factory.mktemp("minilm"))


@pytest.fixture(scope="module")
def server(minilm):
    with AppThread(
        make_engine(minilm, max_model_len=256), served_model_name=["tiny"], max_prompts_per_request=8
    ) as app:
        yield app


@pytest.fixture(scope="module")
def expected(minilm):
    llm = LLM(str(minilm))
    whole = llm.embed(TEXTS, use_tqdm=False)
    short = llm.embed(TEXTS, use_tqdm=False, pooling_params=PoolingParams(dimensions=32))
    return [np.array([each.outputs.embedding for each in outputs]) for outputs in (whole, short)]


def embeddings(answer):
    return np.array([each["embedding"] for each in answer["data"]])


@pytest.mark.parametrize("path", ["/v1/embeddings", "/embeddings"])
def test_texts_in_every_form(server, expected, path):
    answer = server.post(path, input=TEXTS, user="u")
    np.testing.assert_allclose(embeddings(answer), expected[0], atol=1e-5)
    assert [each["index"] for each in answer["data"]] == [0, 1, 2] and answer["model"] == "tiny"
    encode = server.state.engine.tokenizer.encode
    ids = [encode(text) for text in TEXTS]
    num_tokens = sum(map(len, ids))
    assert answer["usage"] == {"prompt_tokens": num_tokens, "completion_tokens": 0, "total_tokens": num_tokens}
    np.testing.assert_allclose(embeddings(server.post(path, input=ids)), expected[0], atol=1e-5)
    for one in (TEXTS[0], ids[0]):
        np.testing.assert_allclose(embeddings(server.post(path, input=one)), expected[0][:1], atol=1e-5)
    np.testing.assert_allclose(embeddings(server.post(path, input=TEXTS, dimensions=32)), expected[1], atol=1e-5)


def test_a_text_that_is_too_long(server):
    error = refused(server, {"input": ["a", "word " * 300]})
    assert "256" in error["message"]
    assert (
        server.post("/v1/embeddings", input="word " * 300, truncate_prompt_tokens=-1)["usage"]["prompt_tokens"] == 256
    )


def refused(server, body, path="/v1/embeddings"):
    answer = server.request("POST", path, json=body)
    assert answer.status_code == 400, answer.text
    return answer.json()["error"]


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"input": []}, "input"),
        ({"input": ""}, "input"),
        ({"input": [""]}, "input"),
        ({"input": [7.5]}, "input"),
        ({"input": [10**6]}, "input"),
        ({"input": None}, "input"),
        ({"input": ["a"] * 9}, "input"),
        ({"dimensions": 0}, "dimensions"),
        ({"dimensions": 10**6}, "dimensions"),
        ({"dimensions": 2.0}, "dimensions"),
        ({"encoding_format": "hex"}, "encoding_format"),
        ({"embed_dtype": "int8"}, "embed_dtype"),
        ({"inputs": "a"}, "inputs"),
    ],
)
def test_bad_bodies(server, body, param):
    assert refused(server, {"input": "a", **body})["param"] == param


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": "a"}),
        ("/rerank", {"query": "a", "documents": ["b"]}),
        ("/v1/score", {"text_1": "a", "text_2": "b"}),
    ],
)
def test_what_the_model_cannot_do(server, path, body):
    error = refused(server, body, path)
    assert error["code"] == "unsupported_task" and "/v1/embeddings" in error["message"]
    assert server.post("/tokenize", prompt="a")["count"] == 3


def test_a_generating_model_says_so(tmp_path):
    with AppThread(make_engine(make_tiny_model(tmp_path))) as app:
        assert "generates" in refused(app, {"input": "a"})["message"]


def test_openais_client(server, expected):
    client = AsyncOpenAI(base_url="http://test/v1", api_key="none", http_client=server._client)
    # Left out, it is base64 on the way and numbers for the caller.
    for options in ({}, {"encoding_format": "float"}, {"encoding_format": "base64"}):
        answer = server.run(client.embeddings.create(model="tiny", input=TEXTS, **options))
        vectors = [each.embedding for each in answer.data]
        if options.get("encoding_format") == "base64":
            vectors = [np.frombuffer(base64.b64decode(vector), "<f4") for vector in vectors]
        np.testing.assert_allclose(np.array(vectors), expected[0], atol=1e-5)
