"""/pooling and /score of a model of late interaction read queries and documents as LLM does."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers
from asgi import AppThread, Serve
from safetensors.torch import save_file
from tiny_encoders import SIZES, save, tensors
from tiny_late_models import WORDS, add_tokenizer, dense, write_modules

from vllm import LLM

DOCUMENTS = ["the cat sits on the mat.", "stop", "a, b, c"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    config = transformers.BertConfig(**SIZES | {"vocab_size": len(WORDS), "max_position_embeddings": 96})
    folder = save(tmp_path_factory.mktemp("colbert"), config)
    add_tokenizer(folder)
    save_file({"linear.weight": torch.randn(16, 32)}, write_modules(folder, dense()))
    (folder / "config_sentence_transformers.json").write_text(json.dumps({"model_type": "ColBERT", "query_length": 8}))
    return folder


@pytest.fixture(scope="module")
def server(serve: Serve, folder: Path) -> AppThread:
    return serve({"max_model_len": 96}, folder)


def test_sides_of_pooling(server, folder):
    llm = LLM(str(folder))
    for side, names in (("query", ["query", "search_query"]), ("document", ["document", "passage", "search_document"])):
        want = tensors(llm.encode(DOCUMENTS, prompt_name=side, pooling_task="token_embed", use_tqdm=False))
        for fields in [{"prompt_name": side}, *({"input_type": name} for name in names)]:
            for path, key in (("/pooling", "data"), ("/v1/embeddings", "embedding")):
                data = server.post(path, input=DOCUMENTS, **fields)["data"]
                for each, vectors in zip(data, want, strict=True):
                    np.testing.assert_allclose(each[key], vectors, atol=1e-5)
    plain = server.post("/pooling", input="stop")["data"][0]["data"]
    assert len(plain) == 3  # with its two special tokens, and neither prefix nor expansion


def test_scores(server, folder):
    want = [each.outputs.score for each in LLM(str(folder)).score("where", DOCUMENTS, use_tqdm=False)]
    data = server.post("/score", text_1="where", text_2=DOCUMENTS)["data"]
    assert [each["score"] for each in data] == pytest.approx(want, abs=1e-5)
    best = server.post("/rerank", query="where", documents=DOCUMENTS)["results"][0]
    assert best["relevance_score"] == pytest.approx(max(want), abs=1e-5)


@pytest.mark.parametrize(
    ("fields", "problem"),
    [
        ({"input": [5, 6]}, "is for texts that are not empty"),
        ({"prompt_name": "query"}, "exclude each other"),
        ({"add_special_tokens": False}, "add_special_tokens does not go with input_type"),
        ({"truncation_side": "left"}, "truncation_side does not go with input_type"),
        ({"truncate_prompt_tokens": 97}, "truncate_prompt_tokens"),
        ({"input_type": "other"}, "Unsupported input_type"),
    ],
)
def test_what_does_not_go_with_sides(server, fields, problem):
    body = {"model": "tiny", "input": "stop", "input_type": "query", **fields}
    answer = server.request("POST", "/pooling", json=body)
    assert answer.status_code == 400 and problem in answer.json()["error"]["message"]


@pytest.mark.parametrize(
    ("body", "named"),
    [
        ({"data_1": "a", "text_2": "b"}, ["text_2", "data_1"]),
        ({"queries": "a", "text_2": ["b"]}, ["text_2", "queries"]),
        ({"text_1": "a"}, ["text_2", "text_1"]),
        ({"text_2": "a"}, ["text_2", "text_1"]),
        ({"query": "a", "documents": ["b"]}, ["documents", "queries"]),
        ({"text_1": "a", "text_2": "b", "query": "c"}, ["query", "items"]),
    ],
    ids=str,
)
@pytest.mark.parametrize("path", ["/score", "/v1/score"])
def test_fields_that_do_not_go_together(server, path, body, named):
    answer = server.request("POST", path, json={"model": "tiny", **body})
    message = answer.json()["error"]["message"]
    assert answer.status_code == 400 and all(name in message for name in named)
    assert "text_1 and text_2, data_1 and data_2, queries and documents" in message
