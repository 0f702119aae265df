"""`vllm embed` and `vllm rerank` from the command line to their files: rows, tables, resuming, servers, Ray."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import pytest
from live_server import LiveServer
from minilm import extract_minilm
from tiny_llm import make_tiny_llm, make_tiny_model

from vllm import LLM, PoolingParams
from vllm.cli.main import main
from vllm.scoring import batches as score_batches
from vllm.scoring import run as score_run

NUM_TEXTS, TOO_LONG = 10, 5
QUERY = "where is the stop"


@pytest.fixture(scope="module")
def minilm(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return extract_minilm(tmp_path_factory.mktemp("minilm"))


@pytest.fixture(scope="module")
def encoder(minilm: Path) -> LLM:
    return LLM(str(minilm), max_model_len=64, hf_overrides={"is_matryoshka": True})


@pytest.fixture(scope="module")
def generating(tmp_path_factory: pytest.TempPathFactory) -> LLM:
    return make_tiny_llm(make_tiny_model(tmp_path_factory.mktemp("tiny"), max_position_embeddings=512))


@pytest.fixture
def load(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Lets commands take a model that is loaded already, in batches of 4."""
    monkeypatch.setattr(score_batches, "BATCH_ROWS", 4)
    return lambda llm: monkeypatch.setattr(score_run, "load", lambda args: llm)


@pytest.fixture(autouse=True)
def _files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    rows = [{"text": f"the stop number {i}", "query": f"where is {i}", "id": i} for i in range(NUM_TEXTS)]
    rows[TOO_LONG]["text"] = "far too long " * 90
    Path("a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def lines(path: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in Path(path).read_text(encoding="utf-8").splitlines()]


def run(command: str, *more: str) -> int:
    return main([command, "a.jsonl", "--quiet", *more])


def test_long_texts_in_parts(minilm: Path, load: Any) -> None:
    llm = LLM(str(minilm), max_model_len=64, pooler_config={"enable_chunked_processing": True})
    load(llm)
    assert run("embed") == 0
    row = lines("a.embeddings.jsonl")[TOO_LONG]
    assert row["num_prompt_tokens"] > 64
    assert row["embedding"] == pytest.approx(llm.embed(row["text"], use_tqdm=False)[0].outputs.embedding, abs=1e-6)


def test_embeddings_are_those_of_llm_embed(encoder: LLM, load: Any) -> None:
    load(encoder)
    assert run("embed", "--dimensions", "16", "--prompt", "query: ") == 1
    rows = lines("a.embeddings.jsonl")
    assert [row["id"] for row in rows] == list(range(NUM_TEXTS))
    assert "must have from 1 to 64" in rows[TOO_LONG]["error"] and "embedding" not in rows[TOO_LONG]
    params = PoolingParams(dimensions=16)
    (expected,) = encoder.embed("query: " + rows[3]["text"], pooling_params=params, use_tqdm=False)
    assert rows[3]["embedding"] == pytest.approx(expected.outputs.embedding, abs=1e-6)
    assert rows[3]["num_prompt_tokens"] == len(expected.prompt_token_ids)
    assert run("embed", "--truncate-prompt-tokens", "-1", "--no-normalize", "--output", "b.jsonl") == 0
    whole = lines("b.jsonl")
    assert whole[TOO_LONG]["num_prompt_tokens"] == 64
    (plain,) = encoder.embed(rows[3]["text"], pooling_params=PoolingParams(use_activation=False), use_tqdm=False)
    assert whole[3]["embedding"] == pytest.approx(plain.outputs.embedding, abs=1e-5)


@pytest.mark.parametrize("kind", ["generating", "encoder"])
def test_scores_are_those_of_llm_score(kind: str, load: Any, request: pytest.FixtureRequest, capsys: Any) -> None:
    llm = request.getfixturevalue(kind)
    load(llm)
    options = ["--score-template", "{{ query }}|{{ document }}"] if kind == "generating" else []
    template = options[-1] if options else None
    assert main(["rerank", "a.jsonl", *options]) == 1
    rows = lines("a.ranked.jsonl")
    assert "the document makes a prompt of" in rows[TOO_LONG]["error"]
    (expected,) = llm.score(rows[3]["query"], rows[3]["text"], use_tqdm=False, chat_template=template)
    assert rows[3]["score"] == pytest.approx(expected.outputs.score, abs=1e-6)
    scores = {row["id"]: row["score"] for row in rows if "score" in row}
    printed = [int(line.split()[1]) for line in capsys.readouterr().out.splitlines()[: len(scores)]]
    assert printed == sorted(scores, key=lambda index: (-scores[index], index))
    one = ["--query", QUERY, "--max-tokens-per-doc", "3", "--output", "one.jsonl"]
    assert run("rerank", *options, *one) == 0
    cut = llm.get_tokenizer().encode(rows[3]["text"], add_special_tokens=False)[:3]
    text = llm.get_tokenizer().decode(cut)
    (expected,) = llm.score(QUERY, text, use_tqdm=False, chat_template=template)
    assert lines("one.jsonl")[3]["score"] == pytest.approx(expected.outputs.score, abs=1e-6)


def test_tables_hold_what_jsonl_holds(encoder: LLM, load: Any) -> None:
    pq = pytest.importorskip("pyarrow.parquet")
    load(encoder)
    for command, name in (("embed", "embedding"), ("rerank", "score")):
        for suffix in ("jsonl", "csv", "parquet"):
            assert run(command, "--output", f"{name}.{suffix}") == 1
        rows = lines(f"{name}.jsonl")
        table = pq.read_table(f"{name}.parquet").to_pylist()
        with Path(f"{name}.csv").open(newline="") as file:
            written = list(csv.DictReader(file))
        for row, own, text in zip(rows, table, written, strict=True):
            assert (own["id"], own["error"]) == (row["id"], row.get("error")) and text["text"] == row["text"]
            if name in row:
                assert own[name] == pytest.approx(row[name], abs=1e-6)
                assert json.loads(text[name]) == pytest.approx(row[name], abs=1e-6)


def test_a_run_goes_on_where_it_was_killed(encoder: LLM, load: Any, capsys: pytest.CaptureFixture[str]) -> None:
    load(encoder)
    for command in ("embed", "rerank"):
        run(command, "--output", "o.jsonl")
        whole = Path("o.jsonl").read_text()
        Path("o.jsonl").write_text(whole[: whole.index("\n", len(whole) // 2) - 5])
        assert run(command, "--output", "o.jsonl") == 2
        assert run(command, "--output", "o.jsonl", "--resume", "--truncate-prompt-tokens", "-1") == 2
        assert "was made from truncate_to None, not -1" in capsys.readouterr().err
        assert run(command, "--output", "o.jsonl", "--resume") == 1
        assert Path("o.jsonl").read_text() == whole
        Path("o.jsonl").unlink()


def test_over_a_server(minilm: Path, encoder: LLM, load: Any) -> None:
    load(encoder)
    run("embed", "--output", "e.jsonl")
    run("rerank", "--output", "r.jsonl")
    with LiveServer(minilm, "--max-model-len", "64") as server:
        assert run("embed", "--url", server.url, "--output", "se.jsonl") == 1
        assert run("rerank", "--url", server.url, "--output", "sr.jsonl") == 1
    for name, own, served in (("embedding", "e.jsonl", "se.jsonl"), ("score", "r.jsonl", "sr.jsonl")):
        for row, other in zip(lines(own), lines(served), strict=True):
            assert ("error" in row) == ("error" in other) and row["id"] == other["id"]
            assert name not in row or row[name] == pytest.approx(other[name], abs=1e-5)


def test_rays_parts_are_the_rows_of_a_run_without_it(
    minilm: Path, encoder: LLM, load: Any, request: pytest.FixtureRequest
) -> None:
    pytest.importorskip("ray", reason="Ray is not installed (pip install 'ray[data]')")
    request.getfixturevalue("ray_cluster")
    load(encoder)
    run("embed", "--output", "e.jsonl")
    engine = ["--model", str(minilm), "--max-model-len", "64"]
    assert run("embed", "--output", "parts", "--backend", "ray", "--replica-cpus", "1", *engine) == 1
    rows = [row for part in sorted(Path("parts").glob("part-*.jsonl")) for row in lines(str(part))]
    for row, other in zip(lines("e.jsonl"), rows, strict=True):
        assert row["id"] == other["id"]
        assert "error" in row or row["embedding"] == pytest.approx(other["embedding"], abs=1e-6)


@pytest.mark.parametrize(
    ("command", "arguments", "message"),
    [
        ("embed", ["--output", "o.txt"], "must end in .jsonl, .csv, .parquet"),
        ("embed", ["--url", "http://x", "--prompt-name", "q"], "--prompt-name needs the model's folder"),
        ("rerank", ["--query-field", "missing"], "a.jsonl:1: no query in the field 'missing'"),
        ("rerank", ["--score-template", "missing.jinja"], "score_template must be one of"),
        ("rerank", ["--url", "http://x", "--score-template", "plain"], "are the server's own"),
        ("rerank", ["--replicas", "2"], "--replicas needs --backend ray"),
    ],
)
def test_bad_arguments(command: str, arguments: list[str], message: str, no_load: None, capsys: Any) -> None:
    assert run(command, *arguments) == 2
    assert message in capsys.readouterr().err


def test_what_a_model_cannot_do(encoder: LLM, generating: LLM, load: Any, capsys: Any) -> None:
    load(generating)
    assert run("embed") == 2 and "does not embed" in capsys.readouterr().err
    load(encoder)
    assert run("embed", "--prompt-name", "q") == 2 and "it has none" in capsys.readouterr().err
    assert run("rerank", "--score-template", "plain") == 2 and "is a bi-encoder" in capsys.readouterr().err
    assert run("rerank", "--score-template", "none", "--output", "none.jsonl") == 1
    assert lines("none.jsonl")[TOO_LONG]["error"] and "score" in lines("none.jsonl")[3]
    assert run("rerank", "--score-labels", "a", "b") == 2 and "that generates" in capsys.readouterr().err
    assert run("embed", "--dimensions", "1000") == 2 and "in range 1 to 384" in capsys.readouterr().err
