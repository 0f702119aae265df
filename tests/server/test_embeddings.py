"""/v1/embeddings and its like: an encoder's vectors as LLM.embed gives them, by the openai SDK too."""

from __future__ import annotations

import base64
import json
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from asgi import AppThread, Serve
from minilm import extract_minilm
from openai import AsyncOpenAI

from vllm import LLM, PoolingParams
from vllm.entrypoints.pooling.utils import MetadataItem, build_metadata_items, decode_pooling_output
from vllm.server.serving.pooling import pooling

TEXTS = ["The cat sits on the mat.", "A kitten is on a rug.", "Stocks fell."]
# As of a model that was trained for it.
CUT = {"matryoshka_dimensions": [12, 32]}


@pytest.fixture(scope="module")
def minilm(tmp_path_factory):
    return extract_minilm(tmp_path_factory.mktemp("minilm"))


@pytest.fixture(scope="module")
def server(serve: Serve, minilm: Path) -> AppThread:
    return serve({"max_model_len": 256, "hf_overrides": CUT}, minilm, max_prompts_per_request=8)


@pytest.fixture(scope="module")
def expected(minilm):
    llm = LLM(str(minilm), hf_overrides=CUT)
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
    encode = server.state.engine.input_processor.tokenizer.encode
    ids = [encode(text) for text in TEXTS]
    num_tokens = sum(map(len, ids))
    assert answer["usage"] == {"prompt_tokens": num_tokens, "completion_tokens": 0, "total_tokens": num_tokens}
    np.testing.assert_allclose(embeddings(server.post(path, input=ids)), expected[0], atol=1e-5)
    for one in (TEXTS[0], ids[0]):
        np.testing.assert_allclose(embeddings(server.post(path, input=one)), expected[0][:1], atol=1e-5)
    np.testing.assert_allclose(embeddings(server.post(path, input=TEXTS, dimensions=32)), expected[1], atol=1e-5)


def test_a_text_that_is_too_long(server):
    error = refused(server, {"input": ["a", "word " * 300]})
    assert "256" in error["message"] and error["code"] == "context_length_exceeded"
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
        ({"input": [5, -1]}, "input"),
        ({"input": None}, "input"),
        ({"input": ["a"] * 9}, "input"),
        ({"dimensions": 0}, "dimensions"),
        ({"dimensions": 10**6}, "dimensions"),
        ({"dimensions": 2.0}, "dimensions"),
        ({"dimensions": 31}, "dimensions"),
        ({"encoding_format": "hex"}, "encoding_format"),
        ({"embed_dtype": "int8"}, "embed_dtype"),
        ({"padding": "max_length"}, "padding"),
        ({"truncate_prompt_tokens": 257}, "truncate_prompt_tokens"),
        ({"messages": [{"role": "user", "content": "a"}]}, "messages"),
        ({"normalize": True, "use_activation": True}, "normalize"),
        ({"inputs": "a"}, "inputs"),
        ({"chat_template": "{{ messages }}"}, "chat_template"),
        ({"add_generation_prompt": True}, "add_generation_prompt"),
    ],
)
def test_bad_bodies(server, body, param):
    assert refused(server, {"input": "a", **body})["param"] == param


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": "a"}),
        ("/classify", {"input": "a"}),
        ("/v1/score", {"query": "a", "items": ["b"], "labels": ["c"]}),
    ],
)
def test_what_the_model_cannot_do(server, path, body):
    error = refused(server, body, path)
    assert error["code"] == "unsupported_task" and "/v1/embeddings" in error["message"]
    assert server.post("/tokenize", prompt="a")["count"] == 3


def test_a_generating_model_says_so(serve):
    app = serve()
    for path in ("/v1/embeddings", "/classify", "/pooling", "/invocations"):
        assert "generates" in refused(app, {"input": "a"}, path)["message"]
    assert "generates" in refused(app, {"texts": ["a"]}, "/v2/embed")["message"]


def test_conversations_and_special_tokens(server, expected):
    template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    chat = {"messages": [{"role": "user", "content": TEXTS[0]}], "chat_template": template}
    with_special = server.post("/v1/embeddings", **chat, add_special_tokens=True)
    np.testing.assert_allclose(embeddings(with_special), expected[0][:1], atol=1e-5)
    plain = server.post("/v1/embeddings", **chat)
    assert plain["usage"]["prompt_tokens"] == with_special["usage"]["prompt_tokens"] - 2
    same = server.post("/v1/embeddings", input=TEXTS[0], add_special_tokens=False)
    np.testing.assert_allclose(embeddings(plain), embeddings(same), atol=1e-6)
    np.testing.assert_allclose(embeddings(server.post("/invocations", **chat)), embeddings(same), atol=1e-6)


def test_several_conversations(server, expected):
    template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    chats = [[{"role": "user", "content": text}] for text in TEXTS]
    options = {"chat_template": template, "add_special_tokens": True}
    for body in ({"messages": chats}, {"input": chats}):
        np.testing.assert_allclose(embeddings(server.post("/v1/embeddings", **body, **options)), expected[0], atol=1e-5)
    one = server.post("/v1/embeddings", input=chats[1], **options)
    np.testing.assert_allclose(embeddings(one), expected[0][1:2], atol=1e-5)
    for bad in ([chats[0], "a"], [chats[0], []], [chats[0], [7]]):
        for field in ("messages", "input"):
            assert refused(server, {field: bad, **options})["param"].startswith(field)


def test_which_end_is_cut(server):
    ids = server.state.engine.input_processor.tokenizer.encode("one two three four")
    for side, kept in (("right", [*ids[:3], ids[-1]]), ("left", [ids[0], *ids[-3:]])):
        cut = server.post("/v1/embeddings", input=ids, truncate_prompt_tokens=4, truncation_side=side)
        np.testing.assert_allclose(embeddings(cut), embeddings(server.post("/v1/embeddings", input=kept)), atol=1e-6)


def test_vectors_that_are_not_normalised(server, expected):
    for name in ("use_activation", "normalize"):
        plain = embeddings(server.post("/v1/embeddings", input=TEXTS, **{name: False}))
        lengths = np.linalg.norm(plain, axis=1, keepdims=True)
        assert (abs(lengths - 1) > 1e-3).all()
        np.testing.assert_allclose(plain / lengths, expected[0], atol=1e-5)


@pytest.mark.parametrize("endianness", [None, "big"])
@pytest.mark.parametrize(("dtype", "error"), [(None, 1e-5), ("bfloat16", 1e-2), ("float16", 1e-3), ("fp8_e4m3", 0.02)])
def test_vectors_as_bytes(server, expected, dtype, error, endianness):
    """Errors are those of rounding numbers below 1/4 to the types' digits."""
    body = {"model": "tiny", "input": TEXTS, "embed_dtype": dtype, "endianness": endianness}
    for form in ("bytes", "bytes_only"):
        answer = server.request("POST", "/v1/embeddings", json={**body, "encoding_format": form})
        if form == "bytes":
            metadata = json.loads(answer.headers["metadata"])
            items = [MetadataItem(**each) for each in metadata["data"]]
            assert metadata["usage"]["prompt_tokens"] > 0
        else:
            items = build_metadata_items(dtype or "float32", endianness or "little", (384,), 3)
            assert "metadata" not in answer.headers
        vectors = torch.stack(decode_pooling_output(items, answer.content)).float()
        np.testing.assert_allclose(vectors.numpy(), expected[0], atol=error)


@pytest.mark.parametrize("path", ["/v2/embed", "/v1/embed", "/embed"])
def test_coheres_bodies(server, expected, path):
    answer = server.post(path, texts=TEXTS, embedding_types=["float", "ubinary", "binary", "base64"])
    vectors = answer["embeddings"]
    np.testing.assert_allclose(np.array(vectors["float"]), expected[0], atol=1e-5)
    bits = np.unpackbits(np.array(vectors["ubinary"], dtype=np.uint8), axis=1)
    np.testing.assert_array_equal(bits, np.array(vectors["float"]) >= 0)
    np.testing.assert_array_equal(np.array(vectors["binary"]) + 128, vectors["ubinary"])
    assert np.frombuffer(base64.b64decode(vectors["base64"][0]), "<f4").tolist() == vectors["float"][0]
    assert answer["texts"] == TEXTS and answer["meta"]["billed_units"]["input_tokens"] > 0
    parts = [{"content": [{"type": "text", "text": TEXTS[0][:9]}, {"type": "text", "text": TEXTS[0][9:]}]}]
    joined = server.post(path, inputs=parts, output_dimension=32, input_type="search_query")["embeddings"]
    joined = joined if isinstance(joined, list) else joined["float"]
    np.testing.assert_allclose(np.array(joined), expected[1][:1], atol=1e-5)


def test_coheres_long_texts(server):
    long = "start " * 200 + "end " * 200
    body = {"texts": [long], "model": "tiny"}
    assert refused(server, {**body, "truncate": "NONE"}, "/v2/embed")["param"] == "texts"
    cut = [
        server.post("/v2/embed", **body, **own)["embeddings"]["float"][0]
        for own in ({}, {"truncate": "END"}, {"truncate": "START"})
    ]
    short = server.post("/v2/embed", **body, max_tokens=9, truncate="START")
    assert short["meta"]["billed_units"]["input_tokens"] == 9
    assert refused(server, {**body, "max_tokens": 9, "truncate": "NONE"}, "/v2/embed")["param"] == "texts"
    fits = {"texts": ["a b c"], "max_tokens": 3, "truncate": "NONE"}
    assert refused(server, fits, "/v2/embed")["param"] == "max_tokens"
    assert cut[0] == cut[1] and not np.allclose(cut[1], cut[2], atol=1e-2)


def test_prompts_by_name(server, monkeypatch):
    monkeypatch.setattr(pooling, "named_prompts", lambda folder: {"query": "the question: "})
    whole = server.post("/v1/embeddings", input=[f"the question: {text}" for text in TEXTS])
    for fields in ({"prompt_name": "query"}, {"input_type": "search_query"}, {"input_type": "query"}):
        found = server.post("/v1/embeddings", input=TEXTS, **fields)
        np.testing.assert_allclose(embeddings(found), embeddings(whole), atol=1e-6)
    cohere = server.post("/v2/embed", texts=TEXTS, input_type="search_query")
    np.testing.assert_allclose(np.array(cohere["embeddings"]["float"]), embeddings(whole), atol=1e-6)
    for fields, param in (
        ({"prompt_name": "search_query"}, "prompt_name"),
        ({"prompt_name": "query", "input_type": "query"}, "prompt_name"),
        ({"prompt_name": "query", "late_chunking_params": {"chunk_size": 2}}, "late_chunking_params"),
        ({"prompt_name": "query", "input": [5]}, "input"),
        ({"input_type": "passage"}, "input_type"),
    ):
        assert refused(server, {"input": "a", **fields})["param"] == param


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "texts"),
        ({"texts": []}, "texts"),
        ({"texts": [""]}, "texts"),
        ({"texts": ["a"], "images": ["data:"]}, "images"),
        ({"texts": ["a"], "input_type": "nonexistent"}, "input_type"),
        ({"texts": ["a"], "embedding_types": ["int8"]}, "embedding_types"),
        ({"texts": ["a"], "output_dimension": 31}, "output_dimension"),
        ({"texts": ["a"], "embedding_types": ["binary"], "output_dimension": 12}, "embedding_types"),
        ({"texts": ["a"], "inputs": [{"content": [{"type": "text", "text": "a"}]}]}, "inputs"),
    ],
)
def test_coheres_bad_bodies(server, body, param):
    assert refused(server, body, "/v2/embed")["param"] == param


def test_scores_are_cosines(server, expected):
    want = expected[0][1:] @ expected[0][0]
    for path in ("/score", "/v1/score"):
        data = server.post(path, text_1=TEXTS[0], text_2=TEXTS[1:])["data"]
        np.testing.assert_allclose([each["score"] for each in data], want, atol=1e-5)
    parts = [{"content": [{"type": "text", "text": text}]} for text in TEXTS[1:]]
    data = server.post("/score", queries={"text": TEXTS[0]}, documents=parts)["data"]
    np.testing.assert_allclose([each["score"] for each in data], want, atol=1e-5)
    image = {"content": [{"type": "image_url", "image_url": {"url": "a"}}]}
    refusal = refused(server, {"queries": "a", "documents": image}, "/score")
    assert refusal["param"] == "documents.content"
    assert "documents.content[0] is of type 'image_url'" in refusal["message"]
    answer = server.post("/rerank", query=TEXTS[0], documents=TEXTS[::-1])
    assert [each["index"] for each in answer["results"]] == [2, 1, 0]
    assert answer["results"][0]["relevance_score"] == pytest.approx(1.0, abs=1e-5)
    # Each text once, the query's among the documents too.
    num_tokens = sum(len(server.state.engine.input_processor.tokenizer.encode(text)) for text in TEXTS)
    assert answer["usage"]["prompt_tokens"] == num_tokens
    long = "word " * 300
    cut = server.post("/rerank", query="the mat " * 9, documents=TEXTS, max_tokens_per_query=2)
    same = server.post("/rerank", query="the mat", documents=TEXTS, cache_salt="s")
    assert cut["results"] == same["results"]
    assert "documents[1]" in refused(server, {"query": "a", "documents": ["b", long]}, "/rerank")["message"]
    assert server.post("/rerank", query="a", documents=[long], truncate_prompt_tokens=-1)["results"]
    assert (
        refused(server, {"text_1": "a", "text_2": "b", "use_activation": False}, "/score")["param"] == "use_activation"
    )


def test_requests_are_counted_by_endpoint(server):
    def counts(name):
        text = server.request("GET", "/metrics").text
        found = re.findall(
            rf'^{name}{{handler="([^"]*)",method="POST"(?:,status="(\w+)")?}} (\S+)$', text, re.MULTILINE
        )
        return {(handler, status): float(value) for handler, status, value in found}

    before = counts("http_requests_total"), counts("vllm:http_prompt_tokens_total")
    usage = server.post("/v1/embeddings", input=TEXTS)["usage"]
    refused(server, {"input": []})
    assert server.request("POST", "/nowhere/7", json={}).status_code == 404
    after = counts("http_requests_total"), counts("vllm:http_prompt_tokens_total")
    for key in (("/v1/embeddings", "2xx"), ("/v1/embeddings", "4xx"), ("none", "4xx")):
        assert after[0][key] == before[0].get(key, 0) + 1
    key = ("/v1/embeddings", "")
    assert after[1][key] == before[1].get(key, 0) + usage["prompt_tokens"]
    assert counts("http_request_duration_seconds_count")[key] == sum(after[0][key[0], each] for each in ("2xx", "4xx"))


def test_vectors_of_tokens(server):
    answer = server.post("/pooling", input=TEXTS[:1], task="token_embed")
    num_tokens = len(server.state.engine.input_processor.tokenizer.encode(TEXTS[0]))
    assert np.array(answer["data"][0]["data"]).shape == (num_tokens, 384)
    whole = server.post("/pooling", input=TEXTS[:1])["data"][0]["data"]
    np.testing.assert_allclose(whole, server.post("/v1/embeddings", input=TEXTS[0])["data"][0]["embedding"], atol=1e-6)


def test_parts_of_texts(server):
    """Means of tokens, before they are normalised; of the whole text its embedding."""
    body = {"input": TEXTS[:2], "late_chunking_params": {"chunk_size": 100}}
    whole = server.post("/v1/embeddings", **body)
    expected = embeddings(server.post("/v1/embeddings", input=TEXTS[:2]))
    np.testing.assert_allclose(np.array([each["embedding"] for each in whole["data"]])[:, 0], expected, atol=1e-5)
    parts = server.post("/v1/embeddings", **{**body, "late_chunking_params": {"chunk_size": 4}}, dimensions=12)
    for text, each in zip(TEXTS, parts["data"], strict=False):
        found, vectors = each["late_chunking"], np.array(each["embedding"])
        assert (found["strategy"], found["chunk_size"]) == ("fixed_tokens", 4)
        assert vectors.shape == (len(found["chunks"]), 12) == (-(-found["input_tokens"] // 4), 12)
        ranges = [chunk["char_range"] for chunk in found["chunks"]]
        assert text[slice(*ranges[0])] == " ".join(text.split()[:3])


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"input": [5, 6]}, "late_chunking_params"),
        ({"truncate_prompt_tokens": 5}, "truncate_prompt_tokens"),
        ({"encoding_format": "bytes"}, "encoding_format"),
        ({"late_chunking_params": {"chunk_size": 0}}, "late_chunking_params.chunk_size"),
        ({"late_chunking_params": {"chunk_size": True}}, "late_chunking_params.chunk_size"),
        ({"late_chunking_params": {"size": 1}}, "late_chunking_params.size"),
        ({"late_chunking_params": {}}, "late_chunking_params.chunk_size"),
    ],
)
def test_texts_that_have_no_parts(server, fields, param):
    assert refused(server, {"input": "a", "late_chunking_params": {"chunk_size": 2}, **fields})["param"] == param


def test_openais_client(server, expected):
    client = AsyncOpenAI(base_url="http://test/v1", api_key="none", http_client=server._client)
    # Left out, it is base64 on the way and numbers for the caller.
    for options in ({}, {"encoding_format": "float"}, {"encoding_format": "base64"}):
        answer = server.run(client.embeddings.create(model="tiny", input=TEXTS, **options))
        vectors = [each.embedding for each in answer.data]
        if options.get("encoding_format") == "base64":
            vectors = [np.frombuffer(base64.b64decode(vector), "<f4") for vector in vectors]
        np.testing.assert_allclose(np.array(vectors), expected[0], atol=1e-5)
