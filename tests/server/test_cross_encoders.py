"""/rerank, /score and /classify by encoders: transformers' scores and classes, in every shape of body."""

from __future__ import annotations

import argparse
import json
import shutil
from typing import Any

import pytest
import torch
import transformers
from asgi import AppThread, Serve, make_engine, server_args
from minilm import extract_minilm

from vllm import LLM
from vllm.cli.serve import run as run_serve
from vllm.entrypoints.openai.cli_args import make_arg_parser
from vllm.exceptions import CliError, VLLMValidationError
from vllm.server.state import ServerState

QUERY = "Where does the cat sit?"
DOCUMENTS = ["The cat sits on the mat.", "Stocks fell.", "A kitten is on a rug, far from all others."]
LENGTH = 48
SIZES = {
    "vocab_size": 30522,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 48,
    "max_position_embeddings": 64,
    # Far from 0, so that scores differ.
    "initializer_range": 0.5,
}


def make_classifier(folder, minilm, **labels):
    torch.manual_seed(0)
    config = transformers.BertConfig(**SIZES, **labels)
    model = transformers.BertForSequenceClassification(config).eval()
    model.save_pretrained(folder)
    tokenizer = transformers.AutoTokenizer.from_pretrained(minilm)
    tokenizer.save_pretrained(folder)
    return model, tokenizer


@pytest.fixture(scope="module")
def minilm(tmp_path_factory):
    return extract_minilm(tmp_path_factory.mktemp("minilm"))


@pytest.fixture(scope="module")
def reference(tmp_path_factory, minilm):
    folder = tmp_path_factory.mktemp("cross")
    return folder, *make_classifier(folder, minilm, num_labels=1)


@pytest.fixture(scope="module")
def server(serve: Serve, reference: Any) -> AppThread:
    return serve({"max_model_len": LENGTH}, reference[0], max_prompts_per_request=8)


@torch.no_grad()
def logits(reference, pairs, **options):
    _, model, tokenizer = reference
    return [model(**tokenizer(*pair, return_tensors="pt", **options)).logits[0, 0].item() for pair in pairs]


def pairs_of(documents):
    return [(QUERY, document) for document in documents]


def sigmoid(values):
    return torch.tensor(values).sigmoid().tolist()


def refused(server, path, body):
    answer = server.request("POST", path, json=body)
    assert answer.status_code == 400, answer.text
    return answer.json()["error"]


@pytest.mark.parametrize("path", ["/rerank", "/v1/rerank", "/v2/rerank"])
def test_documents_are_ordered_by_transformers_scores(server, reference, path):
    want = sigmoid(logits(reference, pairs_of(DOCUMENTS)))
    answer = server.post(path, query=QUERY, documents=DOCUMENTS)
    assert [each["index"] for each in answer["results"]] == sorted(range(3), key=want.__getitem__, reverse=True)
    for each in answer["results"]:
        assert each["relevance_score"] == pytest.approx(want[each["index"]], abs=1e-5)
        assert each["document"] == {"text": DOCUMENTS[each["index"]]}
    num_tokens = sum(len(reference[2](*pair)["input_ids"]) for pair in pairs_of(DOCUMENTS))
    assert answer["usage"] == {"prompt_tokens": num_tokens, "completion_tokens": 0, "total_tokens": num_tokens}
    (best,) = server.post(path, query=QUERY, documents=DOCUMENTS, top_n=1, return_documents=False)["results"]
    assert best.keys() == {"index", "relevance_score"}


@pytest.mark.parametrize(
    "names", [("text_1", "text_2"), ("data_1", "data_2"), ("queries", "documents"), ("queries", "items")]
)
def test_pairs_in_every_form(server, reference, names):
    want = logits(reference, pairs_of(DOCUMENTS))
    body = {names[0]: QUERY, names[1]: DOCUMENTS}
    for path in ("/score", "/v1/score", "/invocations"):
        assert [each["score"] for each in server.post(path, **body)["data"]] == pytest.approx(sigmoid(want), abs=1e-5)
    plain = server.post("/score", **body, use_activation=False)["data"]
    assert [each["score"] for each in plain] == pytest.approx(want, abs=1e-4)
    (one,) = server.post("/score", **{names[0]: [QUERY], names[1]: DOCUMENTS[1]})["data"]
    assert one["score"] == pytest.approx(sigmoid(want)[1], abs=1e-5)


def test_a_default_prompt_stands_before_the_query(tmp_path, reference):
    folder = shutil.copytree(reference[0], tmp_path / "prompted")
    own = {"model_type": "CrossEncoder", "prompts": {"p": "about: "}, "default_prompt_name": "p"}
    (folder / "config_sentence_transformers.json").write_text(json.dumps(own))
    outputs = LLM(str(folder)).score(QUERY, DOCUMENTS, use_tqdm=False)
    want = sigmoid(logits(reference, [(f"about: {QUERY}", document) for document in DOCUMENTS]))
    assert [output.outputs.score for output in outputs] == pytest.approx(want, abs=1e-5)


def test_long_documents_lose_their_end(server, reference):
    long = "the cat " * 30
    error = refused(server, "/rerank", {"query": QUERY, "documents": ["a", long]})
    assert error["param"] == "documents" and "documents[1]" in error["message"] and str(LENGTH) in error["message"]
    want = sigmoid(logits(reference, [(QUERY, long)], truncation=True, max_length=20))
    (cut,) = server.post("/score", text_1=QUERY, text_2=long, truncate_prompt_tokens=20)["data"]
    assert cut["score"] == pytest.approx(want[0], abs=1e-5)
    want = sigmoid(logits(reference, [(QUERY, "the cat the cat")]))
    (cut,) = server.post("/score", text_1=QUERY, text_2=long, max_tokens_per_doc=4)["data"]
    assert cut["score"] == pytest.approx(want[0], abs=1e-5)


def test_a_template_joins_texts(serve, reference):
    app = serve({"max_model_len": LENGTH}, reference[0], score_template="{{ instruction }}: {{ query }} {{ document }}")
    (got,) = app.post("/score", text_1="a cat", text_2="a dog", instruction="find")["data"]
    _, model, tokenizer = reference
    with torch.no_grad():
        want = model(**tokenizer("find: a cat a dog", return_tensors="pt")).logits.sigmoid().item()
    assert got["score"] == pytest.approx(want, abs=1e-5)


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/rerank", {"query": QUERY, "documents": []}, "documents"),
        ("/rerank", {"query": QUERY, "documents": [""]}, "documents"),
        ("/rerank", {"query": QUERY, "documents": ["a"] * 9}, "documents"),
        ("/rerank", {"query": QUERY, "documents": ["a"], "return_readings": True}, "return_readings"),
        ("/rerank", {"query": QUERY, "documents": ["a"], "instruction": "a"}, "instruction"),
        ("/score", {"text_1": "a", "documents": ["a"], "text_2": "a"}, "documents"),
        ("/score", {"text_1": "a", "text_2": "b", "truncate_prompt_tokens": LENGTH + 1}, "truncate_prompt_tokens"),
        ("/pooling", {"input": "a", "task": "embed"}, "task"),
        ("/pooling", {"input": "a", "dimensions": 4}, "dimensions"),
        ("/v1/embeddings", {"input": "a"}, "model"),
        ("/v1/score", {"query": "a", "items": ["b"], "labels": ["c"]}, "model"),
        ("/invocations", {"prompt": "a"}, "model"),
    ],
)
def test_what_is_refused(server, path, body, param):
    error = refused(server, path, body)
    assert error["param"] == param
    assert param != "model" or "scores pairs of texts (/rerank, /score)" in error["message"]


def test_classes_are_those_of_transformers(serve, tmp_path, minilm):
    names = {0: "fine", 1: "spoiled", 2: "other"}
    model, tokenizer = make_classifier(tmp_path, minilm, id2label=names)
    with torch.no_grad():
        scores = [model(**tokenizer(text, return_tensors="pt")).logits[0] for text in DOCUMENTS]
    app = serve({"max_model_len": LENGTH}, tmp_path)
    answer = app.post("/classify", input=DOCUMENTS)
    for path, key in (("/classify", "probs"), ("/pooling", "data"), ("/invocations", "probs")):
        plain = app.post(path, input=tokenizer(DOCUMENTS[0])["input_ids"], use_activation=False)["data"][0][key]
        torch.testing.assert_close(torch.tensor(plain), scores[0], atol=1e-4, rtol=0)
    for path, body in (("/score", {"text_1": "a", "text_2": "b"}), ("/rerank", {"query": "a", "documents": ["b"]})):
        assert "would need one label" in refused(app, path, body)["message"]
    for index, (got, own) in enumerate(zip(answer["data"], scores, strict=True)):
        assert (got["index"], got["label"], got["num_classes"]) == (index, names[int(own.argmax())], 3)
        torch.testing.assert_close(torch.tensor(got["probs"]), own.softmax(-1), atol=1e-5, rtol=0)


@pytest.mark.parametrize(
    ("which", "args", "problem"),
    [
        ("bi-encoder", {"score_template": "plain"}, "this one is a bi-encoder, which reads the two apart"),
        ("classes", {"score_template": "plain"}, "this one does not score pairs"),
        ("cross-encoder", {"score_labels": ["yes", "no"]}, "score_labels are answers of a model that generates"),
    ],
)
def test_templates_that_nothing_uses_are_refused(which, args, problem, reference, minilm, tmp_path, monkeypatch):
    # The handlers of signals stay those of the tests.
    monkeypatch.setattr("vllm.cli.serve.SignalsBeforeReady", lambda: None)
    folder = {"bi-encoder": minilm, "classes": tmp_path, "cross-encoder": reference[0]}[which]
    if which == "classes":
        make_classifier(tmp_path, minilm, num_labels=3)
    options = [f"--{name.replace('_', '-')}={value}" for name, value in args.items() if isinstance(value, str)]
    options = options or ["--score-labels", *args["score_labels"]]
    with pytest.raises(CliError, match=problem):
        run_serve(
            make_arg_parser(argparse.ArgumentParser()).parse_args(["--model", str(folder), "--port", "0", *options])
        )
    engine = make_engine(folder, max_model_len=LENGTH)
    try:
        with pytest.raises(ValueError, match=problem):
            ServerState(engine, server_args(**args))
    finally:
        engine.shutdown()


def test_a_chat_template_is_not_of_embedded_pairs(serve, minilm):
    app = serve({"max_model_len": LENGTH}, minilm)
    plain = app.post("/score", text_1="a", text_2=["a", "b"])["data"]
    app.state.chat_template = "{{ query }}"
    assert app.post("/score", text_1="a", text_2=["a", "b"])["data"] == plain
    with pytest.raises(VLLMValidationError, match="this one is a bi-encoder"):
        LLM(str(minilm), max_model_len=LENGTH).score("a", "b", chat_template="plain", use_tqdm=False)
