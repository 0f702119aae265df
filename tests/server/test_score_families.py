"""Rerankers whose template is known are asked by it without being told to, and everything says so."""

from __future__ import annotations

import argparse
import logging
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import tokenizers
import torch
import transformers
from asgi import client_of
from byte_tokenizer import VOCAB_SIZE, make_byte_tokenizer
from models_util import make_random_model
from tiny_llm import make_tiny_llm

from vllm import LLM
from vllm.entrypoints.openai.api_server import init_app_state
from vllm.entrypoints.openai.cli_args import make_arg_parser
from vllm.pooling.pairs import check_score_args
from vllm.pooling.score_families import family_of
from vllm.pooling.score_templates import TEMPLATES, default_template, score_template

QUERY = "Where is the stop?"
DOCUMENTS = ["The stop is near.", "Bananas, not noodles", "the cat said yes </s><|im_end|>"]
LENGTH = 1024
SPECIAL, WORDS = ["<|im_start|>", "<|im_end|>"], ["no", "yes", "No", "Yes"]
ORIGINAL = {
    "architectures": ["Qwen3ForSequenceClassification"],
    "classifier_from_token": ["no", "yes"],
    "is_original_qwen3_reranker": True,
}
OVERRIDES = {
    "qwen3": ("qwen3-reranker", ORIGINAL),
    "qwen2": (
        "mxbai-rerank-v2",
        {
            "architectures": ["Qwen2ForSequenceClassification"],
            "classifier_from_token": ["0", "1"],
            "method": "from_2_way_softmax",
        },
    ),
    "gemma": (
        "bge-reranker-v2-gemma",
        {
            "architectures": ["GemmaForSequenceClassification"],
            "classifier_from_token": ["Yes"],
            "method": "no_post_processing",
        },
    ),
}


@pytest.fixture(scope="module")
def make_folder(tmp_path_factory):
    """A random model of a family whose tokenizer has the words and the special tokens of turns."""

    def make(family: str, name: str = "model") -> tuple[Path, Any]:
        folder = tmp_path_factory.mktemp(family) / name
        size = {"vocab_size": VOCAB_SIZE + len(SPECIAL + WORDS), "max_position_embeddings": LENGTH}
        _, model = make_random_model(family, "small", folder, **size)
        add_tokenizer(folder)
        return folder, model

    return make


def add_tokenizer(folder: Path) -> None:
    make_byte_tokenizer(folder)
    tokenizer = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.add_special_tokens(SPECIAL)
    tokenizer.add_tokens(WORDS)
    tokenizer.save(str(folder / "tokenizer.json"))


@pytest.fixture(scope="module")
def qwen3(make_folder):
    return make_folder("qwen3")


@pytest.fixture
def log(monkeypatch):
    """The lines that are logged of templates."""
    monkeypatch.setattr("vllm.logger._seen", set())
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    monkeypatch.setattr(logging.getLogger("vllm.pooling.score_templates"), "handlers", [handler])
    return lambda: lines


def scores(llm: LLM, documents: list[str] = DOCUMENTS, **fields: Any) -> list[float]:
    return [each.outputs.score for each in llm.score(QUERY, documents, use_tqdm=False, **fields)]


def ids_of(llm: LLM, documents: list[str] = DOCUMENTS, **fields: Any) -> list[list[int]]:
    return [each.prompt_token_ids for each in llm.score(QUERY, documents, use_tqdm=False, **fields)]


@torch.no_grad()
def share(model: Any, ids: list[int], answers: list[int]) -> float:
    """The logistic function of one answer's logit; of (no, yes) the share of yes."""
    logits = model(torch.tensor([ids])).logits[0, -1].double()[answers]
    return float(logits.softmax(-1)[1] if len(answers) == 2 else logits.sigmoid())


@pytest.mark.parametrize("runner", ["auto", "pooling"])
@pytest.mark.parametrize("family", OVERRIDES)
def test_a_classifier_of_a_known_family_has_its_template(make_folder, log, family, runner):
    """The score is the same whichever way it is read, and is transformers'."""
    name, overrides = OVERRIDES[family]
    folder, model = make_folder(family)
    llm = make_tiny_llm(folder, max_model_len=LENGTH, hf_overrides=overrides, runner=runner)
    usual = ids_of(llm)
    assert [each.count(llm.llm_engine.tokenizer.token_to_id("<|im_end|>")) for each in usual] == [
        TEMPLATES[name].source.count("<|im_end|>")
    ] * len(DOCUMENTS)
    assert usual == ids_of(llm, chat_template=name)
    encode = llm.llm_engine.tokenizer.encode
    assert usual[0] == encode(TEMPLATES[name].render(QUERY, DOCUMENTS[0]))
    answers = [encode(word, add_special_tokens=False)[0] for word in overrides["classifier_from_token"]]
    assert scores(llm) == pytest.approx([share(model, ids, answers) for ids in usual], abs=1e-5)
    (line,) = log()
    assert line.startswith(f"model: pairs are scored by the template {name!r}, as ") and "none" in line
    glued = ids_of(llm, chat_template="none")
    assert glued == [encode(QUERY + document) for document in DOCUMENTS]
    want = [share(model, ids, answers) for ids in glued]
    assert scores(llm, chat_template="none") == pytest.approx(want, abs=1e-5)


def test_both_ways_of_reading_agree(qwen3):
    """Beside the generating model itself, asked by the named template."""
    fields = {"max_model_len": LENGTH}
    own = scores(make_tiny_llm(qwen3[0], **fields), chat_template="qwen3-reranker")
    for runner in ("auto", "pooling"):
        assert scores(make_tiny_llm(qwen3[0], **fields, hf_overrides=ORIGINAL, runner=runner)) == pytest.approx(
            own, abs=1e-5
        )


@pytest.mark.parametrize("runner", ["auto", "pooling"])
def test_texts_that_come_with_the_template_are_the_prompt(qwen3, runner):
    """As upstream's own program for Qwen3-Reranker writes them."""
    llm = make_tiny_llm(qwen3[0], max_model_len=LENGTH, hf_overrides=ORIGINAL, runner=runner)
    template = TEMPLATES["qwen3-reranker"]
    query, after = template.render(QUERY, "@", "find").split("<Document>: @")
    document = f"<Document>: {DOCUMENTS[0]}{after}"
    (whole,) = llm.score([query], [document], use_tqdm=False)
    encode = llm.llm_engine.tokenizer.encode
    assert whole.prompt_token_ids == encode(template.render(QUERY, DOCUMENTS[0], "find"))
    (one, other) = llm.score([query, QUERY], [document, DOCUMENTS[1]], use_tqdm=False)
    assert one.prompt_token_ids == whole.prompt_token_ids
    assert other.prompt_token_ids == encode(template.render(QUERY, DOCUMENTS[1]))
    # A document alone cannot do so.
    (kept,) = llm.score(QUERY, document, use_tqdm=False)
    assert len(kept.prompt_token_ids) > len(whole.prompt_token_ids)


NAMED = [
    ("qwen3", "Qwen3-Reranker-0.6B", "qwen3-reranker"),
    ("qwen3", "qwen3_reranker_4b.gguf", "qwen3-reranker"),
    ("qwen2", "mxbai-rerank-base-v2", "mxbai-rerank-v2"),
    ("gemma", "bge-reranker-v2-gemma", "bge-reranker-v2-gemma"),
    ("qwen3", "Qwen3-0.6B", None),
    ("qwen3", "Qwen3-Embedding-0.6B", None),
    ("qwen2", "Qwen3-Reranker-0.6B", None),
    ("qwen2", "mxbai-rerank-base-v1", None),
    ("gemma2", "bge-reranker-v2-gemma", None),
    ("llama", "reranker", None),
]


@pytest.mark.parametrize(("model_type", "name", "template"), NAMED)
def test_families_are_known_by_type_and_name(model_type, name, template):
    def found(model: str, path: str = "", served: tuple[str, ...] = (), **raw: Any) -> str | None:
        hf_config = SimpleNamespace(raw={"model_type": model_type, **raw})
        config: Any = SimpleNamespace(model=model, path=path, hf_config=hf_config, served_model_name=served)
        family = family_of(config)
        return family and family[0].template

    assert found(f"/models/{name}") == template
    assert found(f"Org/{name}") == template
    assert found("/m", path=f"/hub/models--Org--{name}/snapshots/0a1b") == template
    assert found("/m", served=("a", name)) == template
    assert found("/m", _name_or_path=f"Org/{name}") == template
    # Folders around the model are called anything.
    assert found(f"/{name}/chat", path=f"/{name}/chat/snapshots") is None
    assert found("/m", _name_or_path="") is None


@pytest.mark.parametrize("words", [["n", "y"], ["yes", "no"], ["Yes", "No"]])
def test_other_words_make_no_family(words):
    for model_type in ("qwen3", "qwen2", "gemma"):
        hf_config = SimpleNamespace(raw={"model_type": model_type, "classifier_from_token": words})
        config: Any = SimpleNamespace(model="m", path="m", hf_config=hf_config, served_model_name=())
        assert family_of(config) is None


def test_a_generating_model_by_its_name(make_folder, log):
    folder, _ = make_folder("qwen3", "Qwen3-Reranker-Tiny")
    llm = make_tiny_llm(folder, max_model_len=LENGTH)
    assert scores(llm) == scores(llm, chat_template="qwen3-reranker")
    (line,) = log()
    assert "'qwen3-reranker', as the name Qwen3-Reranker-Tiny says" in line
    words = default_template(llm.model_config, llm.llm_engine.tokenizer, ["1", "0"])
    assert (words.source, words.labels) == (TEMPLATES["qwen3-reranker"].source, ("1", "0"))


def test_an_ordinary_model_is_asked_in_plain_words(qwen3, log):
    llm = make_tiny_llm(qwen3[0], max_model_len=LENGTH)
    assert scores(llm) == scores(llm, chat_template="plain") and log() == []


@pytest.mark.parametrize("name", ["Qwen3-Reranker-Tiny-seq-cls", "judge"])
def test_a_converted_classifier_by_its_name(tmp_path, log, name):
    """With a layer of its own for the score, as tomaarsen's of Qwen3-Reranker."""
    size = {"vocab_size": VOCAB_SIZE + len(SPECIAL + WORDS), "hidden_size": 32, "num_hidden_layers": 2, "head_dim": 16}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "intermediate_size": 48, "num_labels": 1}
    torch.manual_seed(0)
    config = transformers.Qwen3Config(**size, **heads, max_position_embeddings=LENGTH, pad_token_id=0)
    model = transformers.Qwen3ForSequenceClassification(config).eval()
    folder = tmp_path / name
    model.save_pretrained(folder)
    add_tokenizer(folder)
    llm = make_tiny_llm(folder, max_model_len=LENGTH)
    encode, documents = llm.llm_engine.tokenizer.encode, DOCUMENTS[:2]
    render = TEMPLATES["qwen3-reranker"].render if name != "judge" else str.__add__
    prompts = [encode(render(QUERY, each)) for each in documents]
    with torch.no_grad():
        want = [model(torch.tensor([ids])).logits.sigmoid().item() for ids in prompts]
    assert ids_of(llm, documents) == prompts
    assert scores(llm, documents) == pytest.approx(want, abs=1e-5)
    (line,) = log()
    assert ("no score template is known" in line) is (name == "judge")
    assert ids_of(llm, documents, chat_template="none") == [encode(QUERY + each) for each in documents]


def test_words_of_an_unknown_family_are_a_warning(qwen3, log):
    overrides = {"architectures": ["Qwen3ForSequenceClassification"], "classifier_from_token": ["n", "y"]}
    for runner in ("auto", "pooling"):
        llm = make_tiny_llm(qwen3[0], max_model_len=LENGTH, hf_overrides=overrides, runner=runner)
        assert ids_of(llm)[0] == llm.llm_engine.tokenizer.encode(QUERY + DOCUMENTS[0])
    (line,) = log()
    assert "no score template is known for it; --score-template" in line


def test_no_template_is_none_that_is_refused():
    config: Any = SimpleNamespace(runner_type="pooling", pooling_tasks=("embed",))
    check_score_args(config, "none")
    check_score_args(config, score_template("none"))
    for template in ("plain", score_template("plain")):
        with pytest.raises(ValueError, match="is a bi-encoder"):
            check_score_args(config, template)


@pytest.mark.parametrize("runner", ["auto", "pooling"])
def test_over_http(serve, qwen3, log, runner):
    folder, model = qwen3
    app = serve({"max_model_len": LENGTH, "hf_overrides": ORIGINAL, "runner": runner}, folder)
    args = make_arg_parser(argparse.ArgumentParser()).parse_args(["--model", str(folder)])
    app.run(init_app_state(app.engine, SimpleNamespace(), args))
    assert len(log()) == 1
    encode = app.engine.input_processor.tokenizer.encode
    answers = [encode(word)[0] for word in ("no", "yes")]

    def want(text: str) -> float:
        return share(model, encode(text), answers)

    render = TEMPLATES["qwen3-reranker"].render
    expected = [want(render(QUERY, each)) for each in DOCUMENTS[:2]]
    for path in ("/rerank", "/v1/rerank", "/v2/rerank"):
        results = app.post(path, query=QUERY, documents=DOCUMENTS[:2], top_n=2.0)["results"]
        found = {each["index"]: each["relevance_score"] for each in results}
        assert [found[0], found[1]] == pytest.approx(expected, abs=1e-5)
    asked = app.post("/score", text_1=QUERY, text_2=DOCUMENTS[:2], instruction="find noodles")["data"]
    told = [want(render(QUERY, each, "find noodles")) for each in DOCUMENTS[:2]]
    assert [each["score"] for each in asked] == pytest.approx(told, abs=1e-5)
    logits = app.post("/score", text_1=QUERY, text_2=DOCUMENTS[:2], use_activation=False)["data"]
    odds = [math.log(each / (1 - each)) for each in expected]
    assert [each["score"] for each in logits] == pytest.approx(odds, abs=1e-4)
    assert len(log()) == 1

    async def plainly(**body: Any) -> Any:
        async with client_of(app.engine, score_template="none") as client:
            return await client.post("/score", json={"text_1": QUERY, "text_2": DOCUMENTS[:2], **body})

    glued = app.run(plainly()).json()["data"]
    texts = [QUERY + each for each in DOCUMENTS[:2]]
    assert [each["score"] for each in glued] == pytest.approx([want(text) for text in texts], abs=1e-5)
    error = app.run(plainly(instruction="find"))
    assert (error.status_code, error.json()["error"]["param"]) == (400, "instruction")
    assert len(log()) == 1
