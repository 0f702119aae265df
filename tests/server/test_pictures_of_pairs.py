"""Queries and documents with pictures: Qwen3-VL-Reranker's recipe by transformers' model, offline and over HTTP."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest
import torch
from pictures import data_url, drawn
from tiny_vision import Reference, make_chat_model

from vllm import LLM
from vllm.exceptions import VLLMValidationError

pytestmark = pytest.mark.usefixtures("one_thread")

FIRST, SECOND = drawn(40, 30, 1), drawn(24, 50, 2)
PLACE = "<|vision_start|><|image_pad|><|vision_end|>"
INSTRUCTION = "Given a search query, retrieve relevant candidates that answer the query."
# As the model's card has it.
PROMPT = (
    "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and the Instruct "
    'provided. Note that the answer can only be "yes" or "no".<|im_end|>\n'
    "<|im_start|>user\n<Instruct>: {}<Query>:{}\n<Document>:{}<|im_end|>\n<|im_start|>assistant\n"
)
FIELDS = {"dtype": "float32", "max_model_len": 500, "max_logprobs": -1, "max_num_seqs": 8}


def image(picture=FIRST):
    return {"type": "image_url", "image_url": {"url": data_url(picture)}}


def text(words):
    return {"type": "text", "text": words}


DOCUMENTS = [
    {"content": [image(), text("a red square")]},
    "words alone",
    {"content": [text("two: "), image(SECOND), image()]},
    {"content": [text("<|vision_end|> spelt"), image(SECOND)]},
]
WRITTEN = [
    (PLACE + "a red square", [FIRST]),
    ("words alone", []),
    (f"two: {PLACE}{PLACE}", [SECOND, FIRST]),
]


def close(want):
    """Logprobs within 1e-4 move a probability by so much of itself."""
    return pytest.approx(want, rel=5e-4)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    """A folder with the reranker's name, and transformers' readings of it."""
    folder = tmp_path_factory.mktemp("hub") / "Qwen3-VL-Reranker-2B"
    model, tokenizer = make_chat_model("qwen3_vl", folder)
    return folder, Reference(model, tokenizer, "qwen3_vl"), tokenizer


def probability(tiny, prompt, pictures, words=("yes", "no")):
    """exp(l1) / (exp(l1) + exp(l0)) of the two words after a prompt."""
    _, reference, tokenizer = tiny
    ids, values = reference.processed(prompt, pictures)
    sums = []
    for word in words:
        tokens = tokenizer.encode(word, add_special_tokens=False)
        rows = reference.logprobs(ids + tokens, values)[len(ids) - 1 : -1]
        sums.append(sum(float(row[token]) for row, token in zip(rows, tokens, strict=True)))
    return 1 / (1 + math.exp(sums[1] - sums[0]))


def expected(tiny, instruction=INSTRUCTION, query=("which?", [])):
    return [probability(tiny, PROMPT.format(instruction, query[0], own), query[1] + shown) for own, shown in WRITTEN]


@pytest.fixture(scope="module")
def llm(tiny):
    return LLM(str(tiny[0]), **FIELDS)


def test_scores_offline(tiny, llm):
    want = expected(tiny)
    assert max(want) > 1.1 * min(want)
    found = [each.outputs.score for each in llm.score("which?", DOCUMENTS, use_tqdm=False)]
    assert found[:3] == close(want)
    assert 0 < found[3] < 1
    query = {"content": [text("like "), image(SECOND)]}
    want = expected(tiny, query=(f"like {PLACE}", [SECOND]))
    found = [each.outputs.score for each in llm.score(query, DOCUMENTS[:3], use_tqdm=False)]
    assert found == close(want)
    pil = {"content": [{"type": "image_pil", "image_pil": FIRST}, text("a red square")]}
    (one,) = llm.score(query, pil, use_tqdm=False)
    assert one.outputs.score == close(want[0])


def test_scores_over_http(serve, tiny):
    server = serve(FIELDS, tiny[0], served_model_name=["Qwen3-VL-Reranker-2B"])
    for path in ("/score", "/v1/score"):
        data = server.post(path, model=None, text_1="which?", text_2=DOCUMENTS[:3])["data"]
        assert [each["score"] for each in data] == close(expected(tiny))
    data = server.post("/score", model=None, data_1="which?", data_2=DOCUMENTS[0], instruction="look")["data"]
    assert [each["score"] for each in data] == close(expected(tiny, "look")[:1])
    want = expected(tiny)
    for path in ("/rerank", "/v1/rerank", "/v2/rerank"):
        results = server.post(path, model=None, query="which?", documents=DOCUMENTS[:3])["results"]
        scores = {each["index"]: each["relevance_score"] for each in results}
        assert [scores[index] for index in range(3)] == close(want)
        assert [each["index"] for each in results] == np.argsort(-np.array(want)).tolist()
        own = {each["index"]: each["document"] for each in results}
        assert own[1]["text"] == "words alone" and own[0] == {"text": None, "multi_modal": DOCUMENTS[0]}
    query = {"content": [text("like "), image(SECOND)]}
    (first, *_) = server.post("/rerank", model=None, query=query, documents=DOCUMENTS[:1])["results"]
    want = expected(tiny, query=(f"like {PLACE}", [SECOND]))
    assert first["relevance_score"] == close(want[0])


@pytest.mark.parametrize(
    ("fields", "place"),
    [
        ({"documents": [{"content": [image(), {"type": "video_url"}]}]}, "documents[0].content[1].video_url"),
        ({"documents": ["a", {"content": [{"type": "image_url"}]}]}, "documents[1].content[0].image_url"),
        ({"documents": [{"content": []}]}, "documents"),
        ({"documents": [{"content": [image(b"A")]}]}, "documents[0].content[0].image_url.url"),
        ({"documents": [{"content": [image()] * 3}]}, "documents[0].content"),
        ({"query": {"content": [image()] * 2}, "documents": [{"content": [image()]}]}, "documents"),
        ({"documents": ["a\ue0020\ue003"]}, "documents"),
        ({"documents": DOCUMENTS[:1], "max_tokens_per_doc": 3}, "max_tokens_per_doc"),
        ({"query": DOCUMENTS[0], "documents": ["a"], "max_tokens_per_query": 3}, "max_tokens_per_query"),
        ({"documents": DOCUMENTS[:1], "truncate_prompt_tokens": 200}, "documents"),
        ({"documents": DOCUMENTS[:1], "mm_processor_kwargs": {"size": 1}}, "mm_processor_kwargs"),
    ],
)
def test_what_cannot_be_is_a_400(limited, fields, place):
    body = {"model": None, "query": "which?", **fields}
    response = limited.request("POST", "/rerank", json=body)
    assert response.status_code == 400 and response.json()["error"]["param"] == place, response.text


@pytest.fixture(scope="module")
def limited(serve, tiny):
    fields = {**FIELDS, "limit_mm_per_prompt": {"image": 2}}
    return serve(fields, tiny[0], served_model_name=["Qwen3-VL-Reranker-2B"])


def test_more_documents_with_pictures_than_a_prompt_may_have(limited):
    results = limited.post("/rerank", model=None, query="a", documents=[DOCUMENTS[0]] * 5)["results"]
    assert len({each["relevance_score"] for each in results}) == 1


def test_text_only_servers_say_so(tiny):
    llm = LLM(str(tiny[0]), language_model_only=True, **FIELDS)
    with pytest.raises(VLLMValidationError, match="language_model_only"):
        llm.score("a", DOCUMENTS[0], use_tqdm=False)


def test_scores_of_labels(tiny, limited):
    """One picture and several questions, and one question about several pictures."""
    _, reference, tokenizer = tiny

    def logprobs(prompt, pictures):
        ids, values = reference.processed(prompt, pictures)
        row = reference.logprobs(ids, values)[-1]
        return [float(row[tokenizer.encode(word, add_special_tokens=False)[0]]) for word in "yn"]

    picture, labels = {"content": [text("see "), image()]}, ["y", "n"]
    body = {"query": picture, "items": [" red?", " old?"], "labels": labels, "return_token_ids": True}
    data = limited.post("/generative_scoring", model=None, **body)["data"]
    for item, words in zip(data, body["items"], strict=True):
        want = logprobs(f"see {PLACE}{words}", [FIRST])
        assert [each["logprob"] for each in item["labels"]] == pytest.approx(want, abs=1e-4)
        assert item["num_prompt_tokens"] == len(reference.processed(f"see {PLACE}{words}", [FIRST])[0])
        assert item["num_prompt_tokens"] == len(item["prompt_token_ids"])
    items = [picture, {"content": [image(SECOND)]}, "none", tokenizer.encode("ids")]
    answer = limited.post("/v1/score", model=None, query=" red?", items=items, labels=labels, item_first=True)
    prompts = [(f"see {PLACE} red?", [FIRST]), (f"{PLACE} red?", [SECOND]), ("none red?", []), ("ids red?", [])]
    for found, each in zip(answer["logprobs"], prompts, strict=True):
        assert found == pytest.approx(logprobs(*each), abs=1e-4)
    for more, place in (
        ({"items": [{"content": [image(b"A")]}]}, "items[0].content[0].image_url.url"),
        ({"items": [{"contents": []}]}, "items"),
        ({"query": {"content": [image()] * 3}}, "query.content"),
        ({"truncate_prompt_tokens": 20}, "items"),
    ):
        response = limited.request("POST", "/generative_scoring", json={**body, "model": None, **more})
        assert response.status_code == 400 and response.json()["error"]["param"] == place, response.text


@torch.no_grad()
def test_a_classifier_of_two_words(tiny):
    """Upstream's overrides of config.json for this reranker, with words that are one token here."""
    overrides = {
        "architectures": ["Qwen3VLForSequenceClassification"],
        "classifier_from_token": ["n", "y"],
        "is_original_qwen3_reranker": True,
    }
    llm = LLM(str(tiny[0]), runner="pooling", hf_overrides=overrides, dtype="float32", max_model_len=500)
    found = [each.outputs.score for each in llm.score("which?", DOCUMENTS[:3], use_tqdm=False)]
    want = [probability(tiny, PROMPT.format(INSTRUCTION, "which?", own), shown, "yn") for own, shown in WRITTEN]
    assert found == close(want)


def test_a_folder_that_declares_its_template(tiny, tmp_path):
    """As CrossEncoder's folders have it: messages of a query and a document, whose parts may be pictures."""
    folder, _, tokenizer = tiny
    for file in folder.iterdir():
        (tmp_path / file.name).symlink_to(file)
    parts = (
        "{% for p in m.content %}{% if p.type == 'image' %}[" + PLACE + "]{% else %}{{ p.text }}{% endif %}{% endfor %}"
    )
    (tmp_path / "chat_template.jinja").unlink()
    (tmp_path / "chat_template.jinja").write_text("{% for m in messages %}{{ m.role }}: " + parts + "{% endfor %}")
    kind = "sentence_transformers.cross_encoder.modules.logit_score.LogitScore"
    first = {"idx": 0, "name": "0", "path": "", "type": "sentence_transformers.base.modules.transformer.Transformer"}
    modules = [first, {"idx": 1, "name": "1", "path": "1_LogitScore", "type": kind}]
    (tmp_path / "1_LogitScore").mkdir()
    yes, no = (tokenizer.encode(each, add_special_tokens=False)[0] for each in "yn")
    ids = {"true_token_id": yes, "false_token_id": no}
    (tmp_path / "1_LogitScore/config.json").write_text(json.dumps(ids))
    (tmp_path / "modules.json").write_text(json.dumps(modules))
    output = {"method": "forward", "method_output_name": "logits"}
    settings = {
        "transformer_task": "text-generation",
        "modality_config": {"text": output, "message": {**output, "format": "structured"}},
    }
    (tmp_path / "sentence_bert_config.json").write_text(json.dumps(settings))
    (tmp_path / "config_sentence_transformers.json").write_text(json.dumps({"model_type": "CrossEncoder"}))
    llm = LLM(str(tmp_path), **FIELDS)
    (found,) = llm.score("which?", DOCUMENTS[0], use_tqdm=False)
    prompt = f"query: which?document: [{PLACE}]a red square"
    assert found.outputs.score == close(probability(tiny, prompt, [FIRST], "yn"))


@torch.no_grad()
@pytest.mark.parametrize("convert", ["embed", "token_embed"])
def test_embedders_compare_pictures_and_texts(tiny, convert):
    """The cosine, or MaxSim, of what transformers has at the last position, or at all."""
    folder, reference, _ = tiny
    fields = {"convert": "embed"} if convert == "embed" else {"pooler_config": {"task": "token_embed"}}
    llm = LLM(str(folder), runner="pooling", dtype="float32", max_model_len=400, **fields)
    query, documents = DOCUMENTS[0], ["words alone", {"content": [image(SECOND), text("x")]}]
    found = [each.outputs.score for each in llm.score(query, documents, use_tqdm=False)]

    def hidden(prompt, pictures):
        ids, values = reference.processed(prompt, pictures)
        reference.model.base_model.rope_deltas = None
        rows = reference.model.base_model(input_ids=torch.tensor([ids]), **values).last_hidden_state[0]
        return torch.nn.functional.normalize(rows if convert == "token_embed" else rows[-1], dim=-1)

    first = hidden(PLACE + "a red square", [FIRST])
    for score, (prompt, pictures) in zip(found, [("words alone", []), (PLACE + "x", [SECOND])], strict=True):
        other = hidden(prompt, pictures)
        want = first @ other if convert == "embed" else (first @ other.T).amax(-1).sum()
        assert score == pytest.approx(float(want), abs=1e-3 if convert == "token_embed" else 1e-4)
