"""`--image-field` of the commands over files: pictures by path, data URL, base64 and bytes; what may not be read."""

from __future__ import annotations

import argparse
import base64
import csv
import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from live_server import LiveServer
from pictures import data_url, drawn, file_of
from PIL import Image
from tiny_vision import make_chat_model

from vllm import LLM
from vllm.cli.main import main
from vllm.scoring import run as score_run

pytestmark = pytest.mark.usefixtures("one_thread")

FIRST, SECOND = drawn(40, 30, 1), drawn(24, 50, 2)
PLACE = "<|vision_start|><|image_pad|><|vision_end|>"
FIELDS = {"dtype": "float32", "max_model_len": 400}
# A row may have each of these for FIRST, and this list for both.
KINDS = ["pictures/first.png", data_url(FIRST), base64.b64encode(file_of(FIRST)).decode()]
BOTH = ["pictures/first.png", data_url(SECOND)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("vision")
    make_chat_model("qwen3_vl", path)
    return path


@pytest.fixture(scope="module")
def llm(folder: Path) -> LLM:
    return LLM(str(folder), **FIELDS)


@pytest.fixture(scope="module")
def embedder(folder: Path) -> LLM:
    return LLM(str(folder), runner="pooling", convert="embed", **FIELDS)


@pytest.fixture(autouse=True)
def _files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "data/pictures").mkdir(parents=True)
    # Paths are relative to the file, wherever the command runs.
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    FIRST.save(tmp_path / "data/pictures/first.png")
    FIRST.save(tmp_path / "outside.png")
    (tmp_path / "data/pictures/text.png").write_text("words")


def write(rows: list[dict[str, Any]]) -> str:
    path = Path("../data/rows.jsonl")
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def load(monkeypatch: pytest.MonkeyPatch, llm: Any) -> None:
    monkeypatch.setattr(score_run, "load", lambda args: llm)


def run(command: str, file: str, *more: str) -> int:
    return main([command, file, "--quiet", "--image-field", "image", *more])


def lines(path: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in Path(path).read_text(encoding="utf-8").splitlines()]


SCORE = ("--labels", "ab", "c", "--no-picture", "--output", "out.jsonl", "--overwrite")


def scored(llm: LLM, text: str, *pictures: Image.Image) -> list[float]:
    prompt: Any = {"prompt": text.replace("{}", PLACE)}
    if pictures:
        prompt["multi_modal_data"] = {"image": list(pictures)}
    (scores,) = llm.score_labels([prompt], ["ab", "c"], use_tqdm=False)
    return [float(each) for each in scores.logprobs]


def test_scores(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [{"text": "what", "image": each, "id": index} for index, each in enumerate([*KINDS, BOTH, "", None])]
    rows += [{"text": "what", "id": 6}, {"text": "what", "image": "pictures/text.png", "id": 7}]
    load(monkeypatch, llm)
    assert run("score", write(rows), *SCORE, "--template", "see {image}: {text}") == 1
    found = lines("out.jsonl")
    want = [*[scored(llm, "see {}: what", FIRST)] * 3, scored(llm, "see {}{}: what", FIRST, SECOND)]
    want += [scored(llm, "see : what")] * 2
    for row, expected in zip(found, want, strict=False):
        assert list(row["logprobs"].values()) == pytest.approx(expected, abs=1e-4)
    assert [row["id"] for row in found] == list(range(8))
    assert found[0]["image"] == KINDS[0] and "image" not in found[1] and "image" not in found[2]
    assert "PNG" in found[7]["error"] and found[7]["num_prompt_tokens"] is None
    # Without the field in the template they stand before the prompt; a row of a picture alone has no text.
    assert run("score", write([{"image": KINDS[0]}]), *SCORE, "--template", "see {text}") == 0
    assert list(lines("out.jsonl")[0]["logprobs"].values()) == pytest.approx(scored(llm, "{}see ", FIRST), abs=1e-4)


def test_parquet_and_csv(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    load(monkeypatch, llm)
    want = [scored(llm, "{}what", FIRST), scored(llm, "{}what", SECOND)]
    # As Hugging Face's data sets keep pictures.
    images = [{"bytes": file_of(image), "path": None} for image in (FIRST, SECOND)]
    pq.write_table(pa.table({"text": ["what"] * 2, "image": images}), "../data/rows.parquet")
    plain = [file_of(image) for image in (FIRST, SECOND)]
    pq.write_table(pa.table({"text": ["what"] * 2, "image": plain}), "../data/bytes.parquet")
    buffer = io.StringIO()
    writer = csv.writer(buffer)
    writer.writerows([["text", "image"], ["what", "pictures/first.png"], ["what", json.dumps([data_url(SECOND)])]])
    Path("../data/rows.csv").write_text(buffer.getvalue())
    for name in ("rows.parquet", "bytes.parquet", "rows.csv"):
        assert run("score", f"../data/{name}", *SCORE, "--template", "{text}") == 0
        for row, expected in zip(lines("out.jsonl"), want, strict=True):
            assert list(row["logprobs"].values()) == pytest.approx(expected, abs=1e-4)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("../outside.png", "no file '../outside.png' below data"),
        ("/etc/passwd", "no file '/etc/passwd'"),
        ("pictures/missing.png", "no file 'pictures/missing.png'"),
        ("pictures/link.png", "no file 'pictures/link.png'"),
        ("pictures", "no file 'pictures'"),
        (3, "must be a path, a data URL or base64"),
        ([[]], "must be a path, a data URL or base64"),
        ("[x", "begins like a list"),
    ],
)
def test_what_may_not_be_read_is_an_error_before_a_model_loads(
    value: Any, message: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(args: argparse.Namespace) -> LLM:
        raise AssertionError("the model was loaded")

    monkeypatch.setattr(score_run, "load", refuse)
    Path("../data/pictures/link.png").symlink_to("../../outside.png")
    assert run("score", write([{"text": "a", "image": value}]), *SCORE) != 0
    err = capsys.readouterr().err
    assert message in err and "rows.jsonl:1" in err


def test_another_folder_may_be_allowed(llm: LLM, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    load(monkeypatch, llm)
    Path("../data/pictures/link.png").symlink_to("../../outside.png")
    rows = [{"text": "a", "image": each} for each in ("../outside.png", str(tmp_path / "outside.png"))]
    rows.append({"text": "a", "image": "pictures/link.png"})
    assert run("score", write(rows), *SCORE, "--allowed-local-media-path", str(tmp_path), "--template", "{text}") == 0
    for row in lines("out.jsonl"):
        assert list(row["logprobs"].values()) == pytest.approx(scored(llm, "{}a", FIRST), abs=1e-4)


QUESTIONS = [{"type": "choice", "name": "which", "instructions": "which?", "choices": [{"value": "a"}, {"value": "b"}]}]


def rows_of(values: list[Any]) -> list[dict[str, Any]]:
    return [{"text": "see", "query": "where", "image": each} for each in values]


def test_decide_rerank_and_embed(llm: LLM, embedder: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    file = write([*rows_of([KINDS[0], data_url(SECOND), "pictures/text.png", ""])])
    Path("questions.json").write_text(json.dumps(QUESTIONS))
    load(monkeypatch, llm)
    assert run("decide", file, "--questions", "questions.json", "--output", "decided.jsonl") == 1
    parts = [{"type": "input_image", "image_url": data_url(FIRST)}, {"type": "input_text", "text": "see"}]
    (want,) = llm.decide([{"role": "user", "content": parts}], QUESTIONS, use_tqdm=False)
    found = lines("decided.jsonl")
    expected = [each.probability for each in want.answers[0].probabilities]
    assert list(found[0]["answers"]["which"]["probabilities"].values()) == pytest.approx(expected, abs=1e-4)
    assert "error" in found[2]
    assert run("rerank", file, "--output", "ranked.jsonl") == 1
    found = lines("ranked.jsonl")
    content = [{"type": "image_url", "image_url": {"url": data_url(FIRST)}}, {"type": "text", "text": "see"}]
    (want_score,) = llm.score("where", {"content": content}, use_tqdm=False)
    assert found[0]["score"] == pytest.approx(want_score.outputs.score, rel=5e-4)
    (plain,) = llm.score("where", "see", use_tqdm=False)
    assert found[3]["score"] == pytest.approx(plain.outputs.score, rel=5e-4) and "error" in found[2]
    load(monkeypatch, embedder)
    assert run("embed", file, "--output", "embedded.jsonl") == 1
    found = lines("embedded.jsonl")
    (embedding,) = embedder.embed({"prompt": f"user:{PLACE}see", "multi_modal_data": {"image": FIRST}}, use_tqdm=False)
    np.testing.assert_allclose(found[0]["embedding"], embedding.outputs.embedding, atol=1e-4)
    assert "error" in found[2] and "image" not in found[1]


def test_servers_give_the_same_rows(llm: LLM, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Path("questions.json").write_text(json.dumps(QUESTIONS))
    file = write(rows_of([*KINDS, BOTH]))
    commands = {
        "score": ["--labels", "ab", "c", "--no-picture", "--template", "{text}{image}"],
        "decide": ["--questions", "questions.json"],
        "rerank": [],
    }
    load(monkeypatch, llm)
    for name, more in commands.items():
        assert run(name, file, *more, "--output", f"{name}.jsonl") == 0
    with LiveServer(folder, "--max-model-len", "400") as server:
        for name, more in commands.items():
            assert run(name, file, *more, "--url", server.url, "--output", f"{name}.served.jsonl") == 0
    for name in commands:
        for own, served in zip(lines(f"{name}.jsonl"), lines(f"{name}.served.jsonl"), strict=True):
            assert own.keys() == served.keys()
            assert _numbers(served) == pytest.approx(_numbers(own), abs=1e-4)


def test_a_pooling_server_gives_the_same_rows(embedder: LLM, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = write(rows_of([*KINDS, BOTH, "pictures/text.png", ""]))
    load(monkeypatch, embedder)
    more = ["--runner", "pooling", "--convert", "embed", "--max-model-len", "400", "--dtype", "float32"]
    with LiveServer(folder, *more) as server:
        for name, places in {"embedded": (), "served": ("--url", server.url)}.items():
            assert run("embed", file, *places, "--output", f"{name}.jsonl") == 1
    for own, served in zip(lines("embedded.jsonl"), lines("served.jsonl"), strict=True):
        assert own.keys() == served.keys() and own["num_prompt_tokens"] == served["num_prompt_tokens"]
        assert _numbers(served) == pytest.approx(_numbers(own), abs=1e-4)
    assert "PNG" in served_error(lines("served.jsonl")[4]) and lines("served.jsonl")[5]["num_prompt_tokens"]


def served_error(row: dict[str, Any]) -> str:
    assert row.get("embedding") is None
    return str(row["error"])


def _numbers(value: Any) -> list[float]:
    if isinstance(value, dict):
        return [number for each in value.values() for number in _numbers(each)]
    if isinstance(value, list):
        return [number for each in value for number in _numbers(each)]
    return [float(value)] if isinstance(value, float) else []


def test_readings_of_prompts_have_no_pictures(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("score", write(rows_of(KINDS)), "--prompt-logprobs", "2") != 0
    assert "--image-field has no meaning" in capsys.readouterr().err
