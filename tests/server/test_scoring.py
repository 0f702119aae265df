"""/generative_scoring and /v1/score give transformers' numbers, and those of the other ways to ask."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from asgi import AppThread, Serve
from byte_tokenizer import VOCAB_SIZE, make_byte_tokenizer
from models_util import make_random_model, random_prompts
from scoring_reference import assert_item
from tiny_llm import make_tiny_llm

QUERY = "Is the stop near? "
ITEMS = ["the cat", "stop", "\N{GRINNING FACE} on the roof", ""]
TEXTS = [" yes", " no", " yes, the stop", "the", " the stop", " stop"]


@pytest.fixture(scope="module")
def folder_and_model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tiny")
    _, model = make_random_model("llama", "small", folder, vocab_size=VOCAB_SIZE)
    make_byte_tokenizer(folder)
    return folder, model


@pytest.fixture(scope="module")
def model(folder_and_model):
    return folder_and_model[1]


@pytest.fixture(scope="module")
def llm(folder_and_model):
    return make_tiny_llm(folder_and_model[0])


@pytest.fixture(scope="module")
def server(serve: Serve, folder_and_model: Any) -> AppThread:
    return serve({}, folder_and_model[0])


@pytest.fixture(scope="module")
def encode(llm):
    return lambda text: llm.llm_engine.tokenizer.encode(text, add_special_tokens=False)


def rank(server, **body):
    return server.post("/generative_scoring", **{"query": QUERY, "items": ITEMS, **body})


@pytest.mark.parametrize("item_first", [False, True])
@pytest.mark.parametrize("softmax", [False, True])
@pytest.mark.parametrize("kind", ["texts", "ids", "id lists"])
def test_the_numbers_are_those_of_transformers(server, model, encode, item_first, softmax, kind):
    labels = [encode(text) for text in TEXTS] if kind == "texts" else [[5], [9], [200], [2]]
    fields = {
        "texts": {"labels": TEXTS},
        "ids": {"label_token_ids": [ids[0] for ids in labels]},
        "id lists": {"label_token_ids": labels},
    }[kind]
    answer = rank(server, item_first=item_first, apply_softmax=softmax, **fields)
    assert [item["index"] for item in answer["data"]] == list(range(len(ITEMS)))
    for item, text in zip(answer["data"], ITEMS, strict=True):
        prompt = encode(text) + encode(QUERY) if item_first else encode(QUERY) + encode(text)
        assert_item(model, item, prompt, labels, softmax)
        assert item["num_truncated_tokens"] == 0 and "prompt_token_ids" not in item


def test_the_answer_has_upstreams_fields(server):
    answer = rank(server, label_token_ids=[5, 6])
    assert answer["object"] == "list" and answer["model"] == "tiny" and isinstance(answer["created"], int)
    assert answer["id"].startswith("generative-scoring-")
    assert all({"index", "object", "score"} <= set(item) for item in answer["data"])
    assert answer["usage"]["completion_tokens"] == len(answer["data"])
    assert answer["usage"]["total_tokens"] == answer["usage"]["prompt_tokens"] + len(answer["data"])
    assert answer["usage"]["prompt_tokens"] == sum(item["num_prompt_tokens"] for item in answer["data"])


def test_one_label_has_its_true_probability(server, model, encode):
    for fields in ({"labels": [" yes"]}, {"label_token_ids": [5]}, {"label_token_ids": [5], "apply_softmax": True}):
        answer = rank(server, **fields)
        for item, text in zip(answer["data"], ITEMS, strict=True):
            assert_item(
                model, item, encode(QUERY) + encode(text), [encode(" yes") if "labels" in fields else [5]], True
            )
            assert item["score"] == pytest.approx(np.exp(item["labels"][0]["logprob"])) and item["score"] < 0.5
    rows = server.post("/v1/score", query=QUERY, items=ITEMS, label_token_ids=[5], apply_softmax=True)
    assert rows["scores"] == [[item["score"]] for item in answer["data"]]


def test_more_labels_than_any_cap_on_readings(server, model, encode):
    everything = list(range(VOCAB_SIZE))
    assert VOCAB_SIZE > 128
    (item,) = rank(server, items=["the cat"], label_token_ids=everything, apply_softmax=False)["data"]
    prompt = encode(QUERY) + encode("the cat")
    assert_item(model, item, prompt, [[token] for token in everything], softmax=False)
    # All tokens are labels: everything begins with one.
    assert item["label_mass"] == pytest.approx(1, abs=1e-5) and item["argmax_is_label"]
    assert sum(entry["probability"] for entry in item["labels"]) == pytest.approx(1, abs=1e-5)


def test_whether_the_likeliest_token_is_a_label(server):
    (whole,) = rank(server, items=["x"], label_token_ids=list(range(VOCAB_SIZE)))["data"]
    (top,) = [entry["token_ids"][0] for entry in whole["labels"] if entry["rank"] == 1]
    others = [token for token in range(10, 14) if token != top]
    (item,) = rank(server, items=["x"], label_token_ids=others)["data"]
    assert not item["argmax_is_label"]
    (item,) = rank(server, items=["x"], label_token_ids=[*others, top])["data"]
    assert item["argmax_is_label"] and item["prediction"] == item["labels"][-1]["label"]


@pytest.mark.parametrize("labels", [TEXTS, [5, 9, 200], [[5, 6], [5, 7, 8], [9]]])
def test_the_same_as_score_labels(server, llm, encode, labels):
    prompts = [encode(QUERY) + encode(text) for text in ITEMS]
    expected = llm.score_labels(prompts, labels, use_tqdm=False)
    answer = rank(server, **{"labels" if isinstance(labels[0], str) else "label_token_ids": labels})
    for item, scores in zip(answer["data"], expected, strict=True):
        assert [entry["logprob"] for entry in item["labels"]] == scores.logprobs.tolist()
        assert [entry["probability"] for entry in item["labels"]] == scores.probabilities.tolist()
        assert [entry["rank"] for entry in item["labels"]] == [own.token_ranks[0] for own in scores.labels]
        assert item["label_mass"] == scores.mass


def test_the_same_as_completions(server, encode):
    ids = [5, 9, 200]
    answer = rank(server, label_token_ids=ids)
    for item, text in zip(answer["data"], ITEMS, strict=True):
        completion = server.post(
            "/v1/completions", prompt=encode(QUERY) + encode(text), max_tokens=0, logprob_token_ids=ids
        )
        (reading,) = completion["choices"][0]["readings"]
        for entry in item["labels"]:
            own = reading["ids"][str(entry["token_ids"][0])]
            assert own["logprob"] == pytest.approx(entry["logprob"], abs=1e-6)
            assert own["probability"] == pytest.approx(entry["probability"], abs=1e-6)
            assert (own["logit"], own["rank"]) == (entry["logit"], entry["rank"])
        assert reading["mass"] == pytest.approx(item["label_mass"], abs=1e-6)


def test_ids_are_as_good_as_texts(server, encode):
    expected = rank(server, labels=[" yes", " no"])["data"]
    ids = rank(server, query=encode(QUERY), items=[encode(text) for text in ITEMS], labels=[" yes", " no"])["data"]
    mixed = rank(server, items=[encode(ITEMS[0]), *ITEMS[1:]], labels=[" yes", " no"])["data"]
    assert expected == ids == mixed


def test_what_labels_are_called(server, encode):
    (item,) = rank(server, items=["x"], label_token_ids=[[*encode(" stop"), 2], encode("\xe9")[:1]])["data"]
    assert [entry["label"] for entry in item["labels"]] == [" stop</s>", "\N{REPLACEMENT CHARACTER}"]


@pytest.mark.parametrize("item_first", [False, True])
def test_sglangs_shape(server, item_first):
    fields = {"labels": TEXTS, "item_first": item_first}
    true = rank(server, apply_softmax=False, **fields)
    shares = rank(server, **fields)["data"]
    answer = server.post("/v1/score", query=QUERY, items=ITEMS, **fields)
    assert answer["object"] == "scoring" and answer["model"] == "tiny"
    # The prompts are in the cache by now.
    assert answer["usage"]["prompt_tokens"] == true["usage"]["prompt_tokens"]
    # As SGLang does, probabilities are true ones until apply_softmax says otherwise.
    assert answer["scores"] == [[entry["probability"] for entry in item["labels"]] for item in true["data"]]
    assert answer["logprobs"] == [[entry["logprob"] for entry in item["labels"]] for item in true["data"]]
    assert answer["ranks"] == [[entry["rank"] for entry in item["labels"]] for item in true["data"]]
    assert answer["label_mass"] == [item["label_mass"] for item in true["data"]]
    assert answer["argmax_is_label"] == [item["argmax_is_label"] for item in true["data"]]
    softmax = server.post("/v1/score", query=QUERY, items=ITEMS, apply_softmax=True, **fields)
    assert softmax["scores"] == [[entry["probability"] for entry in item["labels"]] for item in shares]
    for row in softmax["scores"]:
        assert sum(row) == pytest.approx(1)
    single = server.post("/v1/score", query=QUERY, items=ITEMS[0], apply_softmax=True, **fields)
    assert single["scores"] == softmax["scores"][:1]


def test_items_share_the_query_in_the_cache(serve, folder_and_model):
    (query,) = random_prompts(VOCAB_SIZE, (80,))
    items = [[token, token + 1] for token in range(20, 30)]
    app = serve({}, folder_and_model[0])

    def cached(**body):
        answer = rank(app, query=query, items=items, label_token_ids=[5, 6], **body)
        assert answer["usage"]["prompt_tokens"] == 820
        return answer["usage"]["prompt_tokens_details"]["cached_tokens"], answer["data"]

    cold, scores = cached()
    # One item computes the query, the other nine find it.
    assert cold == 9 * 80
    warm, again = cached()
    assert warm == 10 * 80 and scores == again
    salted, scores = cached(cache_salt="mine")
    assert salted == cold and scores == again
    assert cached(cache_salt="mine")[0] == warm
    assert cached(cache_salt="theirs")[0] == cold


def test_a_large_request_is_answered_like_many_small_ones(server, encode):
    items = [[token, other] for token in range(10, 110) for other in range(5)]
    labels = list(range(20, 120))
    answer = rank(server, query="a" * 100, items=items, label_token_ids=labels, return_token_ids=True)
    assert [item["prompt_token_ids"] for item in answer["data"]] == [encode("a" * 100) + item for item in items]
    for index in (0, 250, 499):
        (single,) = rank(server, query="a" * 100, items=[items[index]], label_token_ids=labels)["data"]
        for entry, own in zip(answer["data"][index]["labels"], single["labels"], strict=True):
            assert entry["logprob"] == pytest.approx(own["logprob"], abs=1e-5)


def test_without_a_tokenizer_there_are_ids(serve, folder_and_model, server, encode):
    app = serve({"skip_tokenizer_init": True}, folder_and_model[0])
    answer = rank(app, query=encode(QUERY), items=[[5, 6]], label_token_ids=[7, [8, 9]])
    expected = rank(server, query=encode(QUERY), items=[[5, 6]], label_token_ids=[7, [8, 9]])
    names = [entry.pop("label") for entry in answer["data"][0]["labels"]]
    assert names == ["token_id:7", "token_id:8 token_id:9"]
    assert answer["data"][0]["prediction"] in names
    for entry, own in zip(answer["data"][0]["labels"], expected["data"][0]["labels"], strict=True):
        assert entry["logprob"] == own["logprob"]
    for body, param in (
        ({"query": "a", "items": [[5]], "label_token_ids": [7]}, "query"),
        ({"query": [5], "items": [[5], "a"], "label_token_ids": [7]}, "items"),
        ({"query": [5], "items": [[5]], "labels": ["a"]}, "labels"),
    ):
        response = app.request("POST", "/generative_scoring", json=body)
        assert (response.status_code, response.json()["error"]["param"]) == (400, param)
