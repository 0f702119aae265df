"""Pooling models over HTTP: messages with pictures are pooled as transformers' model has their last position."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from pictures import data_url, drawn
from tiny_vision import Reference, make_chat_model

from vllm import LLM

pytestmark = pytest.mark.usefixtures("one_thread")

PLACE = "<|vision_start|><|image_pad|><|vision_end|>"
FIRST, SECOND = drawn(40, 30, 1), drawn(24, 50, 2)


def messages(*pictures):
    parts = [{"type": "image_url", "image_url": {"url": data_url(each)}} for each in pictures]
    return [{"role": "user", "content": [*parts, {"type": "text", "text": "see"}]}]


def text(*pictures):
    return f"user:{PLACE * len(pictures)}see>"


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    folder = tmp_path_factory.mktemp("vision")
    model, tokenizer = make_chat_model("qwen3_vl", folder, ">")
    return folder, Reference(model, tokenizer, "qwen3_vl"), tokenizer


@torch.no_grad()
def hidden(tiny, *pictures):
    """The last hidden states, [T, W]."""
    reference = tiny[1]
    ids, values = reference.processed(text(*pictures), pictures)
    reference.model.base_model.rope_deltas = None
    return reference.model.base_model(input_ids=torch.tensor([ids]), **values).last_hidden_state[0]


def test_embeddings(serve, tiny):
    server = serve({"runner": "pooling", "convert": "embed", "max_model_len": 300}, tiny[0])
    for pictures in ((FIRST,), (FIRST, SECOND), ()):
        want = torch.nn.functional.normalize(hidden(tiny, *pictures)[-1], dim=0).numpy()
        for path, key in (("/v1/embeddings", "embedding"), ("/pooling", "data")):
            (entry,) = server.post(path, messages=messages(*pictures))["data"]
            np.testing.assert_allclose(entry[key], want, atol=1e-4)
    # A name that was sent under a salt is known under it alone.
    body = {"type": "image_url", "image_url": {"url": data_url(FIRST)}, "uuid": "mine"}
    (entry,) = server.post("/v1/embeddings", messages=[{"role": "user", "content": [body]}], cache_salt="a")["data"]
    named = [{"role": "user", "content": [{"type": "image_url", "image_url": None, "uuid": "mine"}]}]
    (again,) = server.post("/v1/embeddings", messages=named, cache_salt="a")["data"]
    np.testing.assert_allclose(again["embedding"], entry["embedding"], atol=1e-4)
    response = server.request("POST", "/v1/embeddings", json={"model": "tiny", "messages": named})
    assert response.status_code == 400 and "not known" in response.text


def test_classes_of_words(serve, tiny):
    folder, reference, tokenizer = tiny
    overrides = {"classifier_from_token": ["n", "y"]}
    server = serve({"runner": "pooling", "hf_overrides": overrides, "max_model_len": 300}, folder)
    for pictures in ((FIRST,), (SECOND,)):
        ids, values = reference.processed(text(*pictures), pictures)
        row = reference.logprobs(ids, values)[-1]
        no, yes = (float(row[tokenizer.encode(word)[0]]) for word in "ny")
        (entry,) = server.post("/classify", messages=messages(*pictures))["data"]
        assert entry["probs"] == pytest.approx([1 / (1 + math.exp(no - yes))], rel=5e-4)
    llm = LLM(str(folder), runner="pooling", hf_overrides=overrides, dtype="float32", max_model_len=300)
    (output,) = llm.classify({"prompt": text(SECOND), "multi_modal_data": {"image": SECOND}}, use_tqdm=False)
    assert output.outputs.probs == pytest.approx(entry["probs"], rel=5e-4)
