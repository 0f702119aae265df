"""Candidates of every kind, and rows that are no labels."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from models_util import make_hf_model
from readers_here import read_here
from tiny_adapters import make_adapter
from tiny_llm import make_tiny_model

import vllm
from vllm.auditing.models import ModelSpec
from vllm.auditing.pooled_rows import embedding_statistics, ranking_statistics
from vllm.auditing.text_rows import text_statistics, text_table
from vllm.cli.main import main
from vllm.engine.arg_utils import EngineArgs
from vllm.exceptions import CliError, VLLMValidationError
from vllm.scoring.batches import deciding


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("candidates") / "m:odd name")


@pytest.mark.parametrize(
    ("text", "engine"),
    [
        ("bfloat16", {"dtype": "bfloat16", "seed": 7}),
        ("bf16", {"dtype": "bfloat16", "seed": 7}),
        ("bf16:int8", {"dtype": "bfloat16", "quantization": "int8", "seed": 7}),
        ("int8", {"dtype": "float32", "quantization": "int8", "seed": 7}),
        ("quantization=int8", {"dtype": "float32", "quantization": "int8", "seed": 7}),
        ("dtype=fp16,max_num_seqs=4", {"dtype": "float16", "max_num_seqs": 4, "seed": 7}),
        ("reference,enable_prefix_caching=False", {"dtype": "float32", "enable_prefix_caching": False, "seed": 7}),
    ],
)
def test_what_names_no_model_is_the_references(model, text, engine):
    reference = ModelSpec.parse(f"{model}:float32,seed=7", None)
    assert reference.engine == {"model": str(model), "dtype": "float32", "seed": 7}
    assert ModelSpec.parse(text, reference).engine == {"model": str(model), **engine}


def test_a_model_has_its_own_settings(model):
    reference = ModelSpec.parse(f"{model}:float32,seed=7", None)
    assert ModelSpec.parse(str(model), reference).engine == {"model": str(model)}
    found = ModelSpec.parse("owner/name:bfloat16:fp8", reference)
    assert found.engine == {"model": "owner/name", "dtype": "bfloat16", "quantization": "fp8"}
    assert ModelSpec.parse("owner/name:Q4_K_M", reference).engine == {"model": "owner/name:Q4_K_M"}
    assert ModelSpec.parse("embedded:float32", None).engine == {"model": None, "dtype": "float32"}
    again = ModelSpec.parse("reference", reference)
    assert again.is_reference and again.engine["max_num_seqs"] == 3 and again.engine["dtype"] == "float32"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{model}:float33", "float33"),
        ("bf16:int9", "int9"),
        ("quantization", "no dtype|no name=value|names no model|quantization"),
        ("seed=x", "seed"),
        ("colour=red", "colour"),
        ("adapter=/none/here", "/none/here"),
        ("http://127.0.0.1:1,dtype=float32", "model=NAME"),
    ],
)
def test_a_bad_candidate_is_named(model, text, message):
    reference = ModelSpec.parse(f"{model}:float32", None)
    if text == "quantization":
        assert ModelSpec.parse(text, reference).engine == {"model": "quantization"}  # a hub's name
        return
    with pytest.raises(CliError, match=message):
        ModelSpec.parse(text.format(model=model), reference)


def test_files_that_change_are_read_anew(model, tmp_path):
    file = tmp_path / "m.gguf"
    file.write_bytes(b"1")
    before = ModelSpec.parse(str(file), None).stamp()
    file.write_bytes(b"12")
    assert ModelSpec.parse(str(file), None).stamp() != before


def test_variables_that_choose_how_a_model_computes_are_part_of_readings(monkeypatch):
    args = EngineArgs()
    usual = deciding(args)
    monkeypatch.setenv("VLLM_CPU_INT8_ACTIVATIONS", "1")
    monkeypatch.setenv("VLLM_ROUNDING", "transformers")
    changed = {"VLLM_CPU_INT8_ACTIVATIONS": True, "VLLM_ROUNDING": "transformers"}
    assert deciding(args) == usual | changed
    for name, value in (("VLLM_CPU_INT8_ACTIVATIONS", "0"), ("VLLM_ROUNDING", "vllm")):
        monkeypatch.setenv(name, value)
    assert deciding(args) == usual


def test_an_adapter_is_a_candidate(model, tmp_path, monkeypatch):
    read_here(monkeypatch)
    adapter = tmp_path / "adapter"
    make_adapter(adapter, make_hf_model("llama", "small", vocab_size=268))
    rows = tmp_path / "rows.jsonl"
    rows.write_text('"one"\n"two"\n')
    arguments = [str(rows), "--labels", "a", "b", "--template", "{text}:", "--reference", f"{model}:float32"]
    arguments += ["--candidate", f"adapter={adapter}", "--candidate", "reference", "--quiet"]
    arguments += ["--readings", str(tmp_path / "r"), "--output", str(tmp_path / "a.json"), "--max-model-len", "128"]
    assert main(["audit", *arguments]) == 0
    adapted, again = json.loads((tmp_path / "a.json").read_text())["candidates"]
    assert adapted["labels"]["kl_mean"] > 0 == again["labels"]["kl_mean"]


def test_documents_and_vectors_are_asked_in_python(model, monkeypatch):
    read_here(monkeypatch)
    rows = [{"text": f"text {i}", "query": f"q{i // 3}"} for i in range(6)]
    options = {"reference": f"{model}:float32", "candidates": ["bfloat16", "reference"], "max_model_len": 128}
    found = vllm.audit(rows, embed=True, convert="embed", **options)
    vectors, again = (each.embedding for each in found.candidates)
    assert vectors.rows == 6 and vectors.cosine_mean < 1 and again.cosine_mean == pytest.approx(1, abs=1e-12)
    orders, again = (each.ranking for each in vllm.audit(rows, rerank=True, **options).candidates)
    assert (orders.rows, orders.queries) == (6, 2) and orders.abs_delta_score > 0 == again.abs_delta_score
    assert vllm.audit(rows, query="one", **options).candidates[1].ranking.queries == 1


def test_rows_that_had_an_error_once_are_read(model, monkeypatch):
    """As those of an earlier output have it."""
    read_here(monkeypatch)
    rows = [{"text": "one", "error": "the prompt has 254 tokens"}, {"text": "two"}]
    options = {"reference": f"{model}:float32", "candidates": "bfloat16", "max_model_len": 128}
    (found,) = vllm.audit(rows, labels=["a", "b"], **options).candidates
    assert (found.rows, found.failed) == (2, 0)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"labels": ["a"], "embed": True}, "labels and embed exclude each other"),
        ({"embed": True, "by": "kind"}, "by has no meaning for embed"),
        ({"labels": ["a"], "chunk_tokens": 8}, "chunk_tokens has no meaning for labels"),
        ({"gold": "label"}, "gold has no meaning for text"),
        ({"labels": []}, "labels must not be empty"),
        ({"labels": " yes"}, "labels must be a list of texts, or of token ids, got ' yes'"),
        ({"labels": [" yes", 5]}, "labels must be a list of texts, or of token ids"),
        ({"labels": ["a"], "limit": -3}, "limit must be at least 1, got -3"),
        ({"chunk_tokens": 2}, "chunk_tokens must be at least 4, got 2"),
    ],
)
def test_what_cannot_be_asked_is_named(fields, message):
    with pytest.raises(VLLMValidationError, match=message):
        vllm.audit(["text"], reference="embedded", candidates="bfloat16", **fields)


def test_orders_of_each_query_are_compared():
    rows = [("x", 3.0, 1.0), ("x", 2.0, 2.0), ("y", 1.0, 1.0), ("y", 0.0, 0.5), ("z", 1.0, 1.0)]
    own = [{"index": i, "query": query, "score": score} for i, (query, score, _) in enumerate(rows)]
    other = [{"index": i, "query": query, "score": score} for i, (query, _, score) in enumerate(rows)]
    found = ranking_statistics(zip(own, other, strict=True), "query")
    assert found is not None and (found.queries, found.best_changes, found.kendall_tau) == (2, 1, 0)
    assert found.rows == 4
    assert found.abs_delta_score == pytest.approx((2 + 0 + 0 + 0.5) / 4)
    assert ranking_statistics(iter([(own[4], other[4])]), "query") is None


def test_vectors_are_compared():
    own = [{"embedding": [1.0, 0.0]}, {"embedding": [0.0, 2.0]}, {"error": "too long"}, {"embedding": [1.0, 1.0]}]
    other = [{"embedding": [2.0, 0.0]}, {"embedding": [1.0, 1.0]}, {"embedding": [1.0, 1.0]}, {"embedding": [1.0, 1.0]}]
    found = embedding_statistics(zip(own, other, strict=True))
    assert found is not None and found.rows == 3
    assert found.cosine_mean == pytest.approx((1 + 0.5**0.5 + 1) / 3) and found.cosine_min == pytest.approx(0.5**0.5)


def test_texts_of_other_lengths_count_by_position():
    own = [{"index": 0, "own_logprobs": [-1.0, -2.0]}, {"index": 1, "own_logprobs": [-3.0]}, {"index": 2, "error": "x"}]
    other = [
        {"kl": [0.1, 0.3], "own_logprobs": [-1.0, -2.0], "same_top": [1, 0]},
        {"kl": [0.8], "own_logprobs": [-3.3], "same_top": [1]},
        {"error": "x"},
    ]
    table = text_table(zip(own, other, strict=True))
    assert table is not None and table.text_sums(table.kl) == pytest.approx([0.4, 0.8])
    found = text_statistics(table)
    assert (found.texts, found.positions) == (2, 3) and found.kl_mean == pytest.approx(0.4)
    assert found.perplexity_ratio == pytest.approx(2.718281828**0.1, rel=1e-6)
    assert found.top1_agreement == pytest.approx(2 / 3)
