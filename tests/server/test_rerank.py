"""/rerank and /score by a generating model: transformers' probabilities of the template's two answers."""

from __future__ import annotations

import json
import math
import shutil
from typing import Any

import pytest
import torch
from asgi import AppThread, Serve
from byte_tokenizer import EOS, VOCAB_SIZE, byte_ids, make_byte_tokenizer
from models_util import make_random_model
from tiny_llm import make_tiny_llm

from vllm.exceptions import VLLMValidationError
from vllm.pooling.pairs import order_of
from vllm.pooling.score_templates import TEMPLATES, ScoreTemplate, score_template

QUERY = "Where is the stop?"
DOCUMENTS = ["The stop is near.", "Bananas", "the cat on the roof \N{GRINNING FACE}", "stop"]
TEMPLATE = "[{{ query }}|{{ document }}]{{ instruction }}:"
LENGTH = 256


@pytest.fixture(scope="module")
def folder_and_model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tiny")
    _, model = make_random_model("qwen3", "small", folder, vocab_size=VOCAB_SIZE)
    make_byte_tokenizer(folder)
    return folder, model


@pytest.fixture(scope="module")
def llm(folder_and_model):
    return make_tiny_llm(folder_and_model[0], max_model_len=LENGTH)


@pytest.fixture(scope="module")
def encode(llm):
    return llm.llm_engine.tokenizer.encode


@pytest.fixture(scope="module")
def server(serve: Serve, folder_and_model: Any) -> AppThread:
    args = {"score_template": TEMPLATE, "score_labels": ["yes", "no"], "max_prompts_per_request": 8}
    return serve({"max_model_len": LENGTH}, folder_and_model[0], **args)


@pytest.mark.parametrize("path", ["/rerank", "/v1/rerank", "/v2/rerank"])
def test_top_k_is_top_n(server, path):
    best = server.post(path, query=QUERY, documents=DOCUMENTS, top_n=2)["results"]
    for count in ({"top_k": 2}, {"top_k": 2, "top_n": 2}, {"top_k": 2, "top_n": 0}):
        assert server.post(path, query=QUERY, documents=DOCUMENTS, **count)["results"] == best
    error = refused(server, path, {"query": QUERY, "documents": DOCUMENTS, "top_n": 2, "top_k": 3}, 400)
    assert error["param"] == "top_k"


@pytest.mark.parametrize("path", ["/rerank", "/v1/rerank", "/v2/rerank"])
def test_vllm_router_reads_a_list(server, path):
    """It sends all of its fields, a model that was left out as "default", and makes the client's answer itself."""
    written = {"model": "default", "top_k": None, "return_documents": True, "rid": None, "user": None}
    whole = server.post(path, query=QUERY, documents=DOCUMENTS)["results"]
    answer = server.post(path, query=QUERY, documents=DOCUMENTS, **written)
    assert answer == [
        {"score": each["relevance_score"], "index": each["index"], "document": each["document"]["text"]}
        for each in whole
    ]
    own = {**written, "rid": "mine", "return_documents": False, "top_k": 1}
    assert server.post(path, query=QUERY, documents=DOCUMENTS, **own) == [
        {"score": whole[0]["relevance_score"], "index": whole[0]["index"]}
    ]
    refused(server, path, {"query": QUERY, "documents": DOCUMENTS, **written, "model": "other"}, 404)
    refused(server, path, {"query": QUERY, "documents": DOCUMENTS, "model": "default"}, 404)


def refused(server, path, body, status):
    answer = server.request("POST", path, json=body)
    assert answer.status_code == status, answer.text
    return answer.json()["error"]


@torch.no_grad()
def expected(model, encode, text, labels=("yes", "no")):
    """(probability of the first label among both, the labels' logprobs), from float32 logits."""
    totals = []
    for label in labels:
        ids, own = encode(text), encode(label, add_special_tokens=False)
        logprobs = model(torch.tensor([ids + own])).logits[0].double().log_softmax(-1)
        totals.append(sum(logprobs[len(ids) - 1 + place, token] for place, token in enumerate(own)))
    return torch.stack(totals).softmax(0)[0].item(), [total.item() for total in totals]


def rendered(document, query=QUERY, instruction=None):
    return (
        TEMPLATE.replace("{{ query }}", query)
        .replace("{{ document }}", document)
        .replace("{{ instruction }}", instruction or TEMPLATES["plain"].instruction)
    )


@pytest.mark.parametrize("path", ["/rerank", "/v1/rerank", "/v2/rerank"])
def test_documents_are_ordered_by_transformers_probabilities(server, folder_and_model, encode, path):
    want = [expected(folder_and_model[1], encode, rendered(document))[0] for document in DOCUMENTS]
    answer = server.post(path, query=QUERY, documents=DOCUMENTS, model=None, return_documents=None)
    results = answer["results"]
    assert [each["index"] for each in results] == sorted(range(len(want)), key=want.__getitem__, reverse=True)
    for each in results:
        assert each["relevance_score"] == pytest.approx(want[each["index"]], abs=1e-5)
        assert each["document"] == {"text": DOCUMENTS[each["index"]]}
    num_tokens = sum(len(encode(rendered(document))) for document in DOCUMENTS)
    assert answer["usage"]["prompt_tokens"] == answer["usage"]["total_tokens"] == num_tokens


def test_the_best_without_their_documents(server):
    whole = server.post("/rerank", query=QUERY, documents=[{"text": text} for text in DOCUMENTS])["results"]
    best = server.post("/rerank", query=QUERY, documents=DOCUMENTS, top_n=2, return_documents=False)["results"]
    assert len(best) == 2 and all(each.keys() == {"index", "relevance_score"} for each in best)
    assert [each["relevance_score"] for each in best] == [each["relevance_score"] for each in whole[:2]]


@pytest.mark.parametrize("names", [("text_1", "text_2"), ("data_1", "data_2"), ("queries", "documents")])
@pytest.mark.parametrize("path", ["/score", "/v1/score"])
def test_pairs_of_texts(server, folder_and_model, encode, names, path):
    _, model = folder_and_model
    one = server.post(path, **{names[0]: QUERY, names[1]: DOCUMENTS})
    each = server.post(path, **{names[0]: [QUERY, "a"], names[1]: DOCUMENTS[:2]})
    want = [expected(model, encode, rendered(document))[0] for document in DOCUMENTS]
    assert [entry["score"] for entry in one["data"]] == pytest.approx(want, abs=1e-5)
    assert [entry["index"] for entry in one["data"]] == [0, 1, 2, 3]
    assert each["data"][1]["score"] == pytest.approx(expected(model, encode, rendered(DOCUMENTS[1], "a"))[0], abs=1e-5)
    # Our own kind of body at the same path.
    own = server.post(path, query=rendered("x"), items=[""], labels=["yes", "no"], apply_softmax=True)
    assert own["scores"][0][0] == pytest.approx(expected(model, encode, rendered("x"))[0], abs=1e-5)


def test_log_odds_readings_and_instructions(server, folder_and_model, encode):
    body = {"text_1": QUERY, "text_2": DOCUMENTS[0], "instruction": "Judge"}
    (entry,) = server.post("/score", **body, use_activation=False, return_readings=True)["data"]
    _, logprobs = expected(folder_and_model[1], encode, rendered(DOCUMENTS[0], instruction="Judge"))
    assert entry["score"] == pytest.approx(logprobs[0] - logprobs[1], abs=1e-4)
    answers = entry["readings"]["answers"]
    assert [answer["label"] for answer in answers] == ["yes", "no"]
    assert [answer["logprob"] for answer in answers] == pytest.approx(logprobs, abs=1e-4)
    named = {"instruction": "Not this", "chat_template_kwargs": {"instruction": "Judge"}}
    (same,) = server.post("/score", **{**body, **named}, use_activation=False)["data"]
    assert same["score"] == entry["score"]
    assert entry["readings"]["label_mass"] == pytest.approx(sum(map(math.exp, logprobs)), rel=1e-3)


def test_a_query_is_read_once(server):
    documents = [f"{number} document" for number in range(6)]
    usage = server.post("/rerank", query="one long query " * 6, documents=documents)["usage"]
    # Five documents share all that stands before them, as usage counts it: in steps of 16.
    shared = len(TEMPLATE.partition("{{ document }}")[0].replace("{{ query }}", "one long query " * 6))
    assert usage["prompt_tokens_details"]["cached_tokens"] == 5 * (shared // 16 * 16)


def test_long_documents_lose_their_end(server, folder_and_model, encode):
    _, model = folder_and_model
    long = "abc " * 100
    (cut,) = server.post("/score", text_1="q", text_2=long, max_tokens_per_doc=8)["data"]
    assert cut["score"] == pytest.approx(expected(model, encode, rendered(long[:8], "q"))[0], abs=1e-5)
    limit = len(encode(rendered(long, "q"))) - len(long) + 20
    (cut,) = server.post("/score", text_1="q", text_2=long, truncate_prompt_tokens=limit)["data"]
    assert cut["score"] == pytest.approx(expected(model, encode, rendered(long[:20], "q"))[0], abs=1e-5)
    for truncate in (None, 12):
        body = {"query": "q", "documents": ["a", long], "truncate_prompt_tokens": truncate}
        error = refused(server, "/rerank", body, 400)
        assert error["param"] == "documents" and ("documents[1]" if truncate is None else "tokens") in error["message"]


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"documents": []}, "documents"),
        ({"chat_template_kwargs": {"tone": "a"}}, "chat_template_kwargs"),
        ({"chat_template_kwargs": {"instruction": 7}}, "chat_template_kwargs"),
        ({"max_tokens_per_query": -1}, "max_tokens_per_query"),
        ({"documents": None}, "documents"),
        ({"documents": [""]}, "documents"),
        ({"documents": [7]}, "documents"),
        ({"documents": [{"title": "a"}]}, "documents"),
        ({"documents": ["a"] * 9}, "documents"),
        ({"query": ["a"]}, "query"),
        ({"query": ""}, "query"),
        ({"top_n": -1}, "top_n"),
        ({"top_n": True}, "top_n"),
        ({"max_tokens_per_doc": -1}, "max_tokens_per_doc"),
        ({"truncate_prompt_tokens": 0}, "truncate_prompt_tokens"),
        ({"rank_fields": ["title"]}, "rank_fields"),
        ({"return_document": True}, "return_document"),
    ],
)
def test_bad_bodies(server, body, param):
    error = refused(server, "/rerank", {"query": QUERY, "documents": DOCUMENTS, **body}, 400)
    assert error["param"] == param


def test_pairs_that_are_none(server):
    assert refused(server, "/score", {"text_1": "a"}, 400)["param"] == "text_2"
    assert refused(server, "/score", {"text_1": ["a", "b"], "text_2": ["a", "b", "c"]}, 400)["param"] == "text_1"
    assert "exclude" in refused(server, "/score", {"text_1": "a", "queries": "b", "text_2": "c"}, 400)["message"]


def test_offline_scores_are_the_servers(llm, server, folder_and_model, encode):
    outputs = llm.score(QUERY, DOCUMENTS, use_tqdm=False, chat_template=TEMPLATE)
    served = server.post("/score", text_1=QUERY, text_2=DOCUMENTS)["data"]
    assert [each.outputs.score for each in outputs] == pytest.approx([each["score"] for each in served], abs=1e-6)
    (cut,) = llm.score("q", "ab " * 200, use_tqdm=False, tokenization_kwargs={"truncation": True, "max_length": 150.0})
    for length in (0, 150.5, "150"):
        with pytest.raises(VLLMValidationError, match="truncate_prompt_tokens"):
            llm.score("q", "ab", use_tqdm=False, tokenization_kwargs={"truncate_prompt_tokens": length})
    assert len(cut.prompt_token_ids) <= 150
    with pytest.raises(VLLMValidationError, match=r"data_2\[0\] makes a prompt of"):
        llm.score("q", "ab " * 200, use_tqdm=False)
    with pytest.raises(VLLMValidationError, match="score template fails"):
        llm.score("q", "d", use_tqdm=False, chat_template="{{ nothing.there }}")


def test_templates_with_messages(llm, folder_and_model, encode):
    source = (
        '{{ messages | selectattr("role", "eq", "document") | map(attribute="content") | first }}/'
        '{{ messages | selectattr("role", "eq", "query") | map(attribute="content") | first }}'
    )
    (output,) = llm.score("q", "d", use_tqdm=False, chat_template=source)
    assert output.prompt_token_ids == encode("d/q")


def test_special_tokens_in_texts_stay_text(llm, folder_and_model, encode):
    """ "</s>" in a document is four characters, not the token that ends a turn; in the template it is the token."""
    source, query, document = "{{ query }}</s>[{{ document }}]</s>:", "the <s>", "stop</s>the \N{GRINNING FACE}</s>"
    plain = llm.llm_engine.tokenizer.encode_plain
    assert plain("</s>") == byte_ids("</s>")
    ids = [*plain("the <s>"), EOS, *plain(f"[{document}]"), EOS, *encode(":")]
    outputs = llm.score(query, [document, "stop"], use_tqdm=False, chat_template=source)
    assert outputs[0].prompt_token_ids == ids and ids.count(EOS) == 2
    assert outputs[1].prompt_token_ids == [*plain("the <s>"), EOS, *encode("[stop]</s>:")]
    (usual,) = llm.score("the", ["stop"], use_tqdm=False, chat_template=source)
    assert usual.prompt_token_ids == encode("the</s>[stop]</s>:")
    (cut,) = llm.score(
        "q", f"{document} " * 40, use_tqdm=False, chat_template=source, tokenization_kwargs={"truncation": True}
    )
    assert cut.prompt_token_ids.count(EOS) == 2
    with pytest.raises(VLLMValidationError, match="spells a special token"):
        llm.score("q", document, use_tqdm=False, chat_template="{{ query }}{{ document | upper }}")


def test_an_error_of_the_template_is_none_of_length(server, monkeypatch):
    failing = ScoreTemplate("{{ query }}{{ tone }}{{ document }}")
    monkeypatch.setitem(server.state.__dict__, "score_template", failing)
    error = refused(server, "/rerank", {"query": "q", "documents": ["a"]}, 400)
    assert error["param"] == "score_template" and error["code"] != "context_length_exceeded"
    changing = ScoreTemplate("{{ query }}{{ document | upper }}")
    monkeypatch.setitem(server.state.__dict__, "score_template", changing)
    special = server.state.tokenizer.decode([EOS], skip_special_tokens=False)
    error = refused(server, "/score", {"text_1": "q", "text_2": f"a{special}"}, 400)
    assert (error["param"], error["code"]) == ("text_2", "invalid_value") and "special token" in error["message"]


def test_a_classifier_of_two_words(folder_and_model, encode):
    """As upstream's programs load Qwen3-Reranker: the texts are given as the model is to read them."""
    folder, model = folder_and_model
    overrides = {
        "architectures": ["Qwen3ForSequenceClassification"],
        "classifier_from_token": ["no", "yes"],
        "is_original_qwen3_reranker": True,
    }
    llm = make_tiny_llm(folder, max_model_len=LENGTH, hf_overrides=overrides)
    query, documents = "<Instruct>: a\n<Query>: b\n", ["<Document>: c", "<Document>: d e"]
    outputs = llm.score([query] * 2, documents, use_tqdm=False)
    for output, document in zip(outputs, documents, strict=True):
        assert output.outputs.score == pytest.approx(expected(model, encode, query + document)[0], abs=1e-5)
    with pytest.raises(ValueError, match="classifier_from_token must be two different words"):
        make_tiny_llm(folder, hf_overrides={**overrides, "classifier_from_token": ["yes"]})
    with pytest.raises(ValueError, match="method must be from_2_way_softmax"):
        make_tiny_llm(folder, hf_overrides={**overrides, "method": "other"})


@pytest.mark.parametrize("words", [None, ["n", "y"]], ids=["generator", "classifier"])
def test_a_default_prompt_stands_before_the_query(tmp_path, folder_and_model, encode, words):
    folder = shutil.copytree(folder_and_model[0], tmp_path / "prompted")
    own = {"model_type": "CrossEncoder", "prompts": {"p": "about: "}, "default_prompt_name": "p"}
    (folder / "config_sentence_transformers.json").write_text(json.dumps(own))
    overrides = {"architectures": ["Qwen3ForSequenceClassification"], "classifier_from_token": words} if words else {}
    runner = "pooling" if words else "generate"
    llm = make_tiny_llm(folder, max_model_len=LENGTH, hf_overrides=overrides, runner=runner)
    template = score_template(None, None, overrides)
    texts = [template.render(f"about: {QUERY}", document) for document in DOCUMENTS]
    want = [expected(folder_and_model[1], encode, text, template.labels)[0] for text in texts]
    scores = [each.outputs.score for each in llm.score(QUERY, DOCUMENTS, use_tqdm=False)]
    assert scores == pytest.approx(want, abs=1e-5)


@pytest.mark.parametrize(
    ("family", "name"), [("gemma", "bge-reranker-v2-gemma"), ("qwen2", "mxbai-rerank-v2"), ("qwen3", "qwen3-reranker")]
)
def test_built_in_templates_order_documents_as_transformers(tmp_path, family, name):
    _, model = make_random_model(family, "small", tmp_path, vocab_size=VOCAB_SIZE, max_position_embeddings=1024)
    make_byte_tokenizer(tmp_path)
    llm = make_tiny_llm(tmp_path, max_model_len=1024)
    encode, template = llm.llm_engine.tokenizer.encode, TEMPLATES[name]
    want = [expected(model, encode, template.render(QUERY, each), template.labels)[0] for each in DOCUMENTS]
    scores = [each.outputs.score for each in llm.score(QUERY, DOCUMENTS, chat_template=name, use_tqdm=False)]
    assert scores == pytest.approx(want, abs=1e-5)
    assert order_of(scores) == order_of(want)


def test_published_wordings():
    qwen = TEMPLATES["qwen3-reranker"].render("Q", "D")
    assert qwen.startswith("<|im_start|>system\nJudge") and qwen.endswith("<think>\n\n</think>\n\n")
    assert "<Query>: Q\n<Document>: D<|im_end|>" in qwen
    assert TEMPLATES["mxbai-rerank-v2"].labels == ("1", "0")
    for template in TEMPLATES.values():
        assert "{" not in template.render("Q", "D").replace("{{", "")


def test_templates_that_are_none(tmp_path):
    with pytest.raises(ValueError, match="score_template must be one of plain"):
        score_template("qwen-reranker")
    with pytest.raises(ValueError, match="two different words"):
        score_template("plain", ["yes"])
    path = tmp_path / "own.jinja"
    path.write_text("{{ query }}?{{ document }}", encoding="utf-8")
    assert score_template(str(path), ["1", "0"]).render("a", "b") == "a?b"
    assert json.dumps(score_template(None).labels) == '[" yes", " no"]'
