"""`vllm score --backend ray`: the rows of a run without Ray, whoever dies on the way."""

from __future__ import annotations

import csv
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from preloaded import FORKED
from ray_cluster import actor_pids, kill_an_actor_at_first_part
from tiny_llm import make_tiny_llm, make_tiny_model

from vllm.cli.main import main
from vllm.scoring import batches as score_batches
from vllm.scoring import run as score_run

pytest.importorskip("ray", reason="Ray is not installed (pip install 'ray[data]')")

NUM_TEXTS, BATCH_ROWS = 197, 8
NUM_PARTS = -(-NUM_TEXTS // BATCH_ROWS)
LABELS = ["a", "the stop"]
ENGINE = "ray::ScoringEngine"

# Runs the command and kills itself when so many parts are written.
KILLED_RUN = """
import os, signal, sys
from vllm.scoring import batches as score_batches
from vllm.cli.main import main
from vllm.scoring.rows import PartFolder

parts_left, score_batches.BATCH_ROWS = int(sys.argv[1]), int(sys.argv[2])
plain = PartFolder.write

def write(self, number, content):
    global parts_left
    plain(self, number, content)
    parts_left -= 1
    if not parts_left:
        os.kill(os.getpid(), signal.SIGKILL)

PartFolder.write = write
sys.exit(main(sys.argv[3:]))
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def folder(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With the input, a.jsonl, and what `vllm score` makes of it without Ray, whole.jsonl."""
    folder = tmp_path_factory.mktemp("score")
    rows: list[Any] = [{"text": f"the stop {i}", "id": i, "who": ["x", i]} for i in range(NUM_TEXTS)]
    rows[20]["text"] = "far too long " * 20
    (folder / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.setattr(score_run, "load", lambda args: make_tiny_llm(model))
        patch.setattr(score_batches, "BATCH_ROWS", BATCH_ROWS)
        assert main([*arguments(model, "whole.jsonl"), "--no-picture", "--quiet"]) == 1
    return folder


@pytest.fixture(autouse=True)
def _there(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    monkeypatch.setattr(score_batches, "BATCH_ROWS", BATCH_ROWS)


def arguments(model: Path, output: str, *more: str) -> list[str]:
    engine = ["--model", str(model), "--dtype", "float32", "--max-model-len", "128"]
    return ["score", "a.jsonl", "--labels", *LABELS, "--template", "{id}: {text}", "--output", output, *engine, *more]


def on_ray(model: Path, output: str, *more: str) -> list[str]:
    return arguments(model, output, "--backend", "ray", "--replicas", "2", "--replica-cpus", "1", "--quiet", *more)


def joined(output: str) -> bytes:
    return b"".join(path.read_bytes() for path in sorted(Path(output).glob("part-*")))


def test_an_actor_killed_in_the_middle(
    model: Path, ray_cluster: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    killed = kill_an_actor_at_first_part(monkeypatch, ENGINE)
    assert main(on_ray(model, "killed")) == 1
    assert killed and killed[0] not in actor_pids(ENGINE)
    assert joined("killed") == Path("whole.jsonl").read_bytes()
    assert len(list(Path("killed").iterdir())) == NUM_PARTS
    assert f"1 of {NUM_TEXTS} texts failed" in capsys.readouterr().err


def test_a_stage_killed_in_the_middle(model: Path, ray_cluster: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine ends with it, and another is started."""
    killed = kill_an_actor_at_first_part(monkeypatch, "ray::_WorkerActor")
    stages = ["--replicas", "1", "--replica-cpus", "1", "--pipeline-parallel-size", "2"]
    assert main(on_ray(model, "staged", *stages, "--distributed-executor-backend", "ray")) == 1
    assert killed and killed[0] not in actor_pids("ray::_WorkerActor")
    assert joined("staged") == Path("whole.jsonl").read_bytes()
    assert len(list(Path("staged").iterdir())) == NUM_PARTS


def test_killed_itself_and_resumed(model: Path, ray_cluster: str, capsys: pytest.CaptureFixture[str]) -> None:
    import pyarrow.parquet as pq

    parquet = ["--output-format", "parquet"]
    command = [
        sys.executable,
        "-c",
        FORKED + KILLED_RUN,
        "7",
        str(BATCH_ROWS),
        *on_ray(model, "stopped", "--replicas", "1", *parquet),
    ]
    environment = {**os.environ, "RAY_ADDRESS": ray_cluster}
    result = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert result.returncode == -signal.SIGKILL, result.stderr
    there = {path: path.stat().st_mtime_ns for path in Path("stopped").glob("part-*")}
    assert len(there) == 7
    # A kill in the middle of writing leaves such a file behind.
    half = Path("stopped/.part-00000023.parquet.1.tmp")
    half.write_text("{")

    assert main(on_ray(model, "stopped", *parquet)) == 2
    assert "stopped exists; --resume continues it" in capsys.readouterr().err
    arguments = on_ray(model, "stopped", "--resume", "--replicas", "1", *parquet)
    assert main([each for each in arguments if each != "--quiet"]) == 1
    captured = capsys.readouterr()
    assert f"resumed:    56 of {NUM_TEXTS} rows were there" in captured.out
    assert f"1 of {NUM_TEXTS} texts failed" in captured.err
    assert not half.exists() and all(path.stat().st_mtime_ns == then for path, then in there.items())

    rows = [row for path in sorted(Path("stopped").iterdir()) for row in pq.read_table(path).to_pylist()]
    whole = [json.loads(line) for line in Path("whole.jsonl").read_bytes().splitlines()]
    for row, expected in zip(rows, whole, strict=True):
        assert json.loads(row.pop("who")) == expected.pop("who")
        assert {name: value for name, value in row.items() if value is not None} == expected

    # All is there: neither a cluster nor a model is needed.
    assert main([*on_ray(model, "stopped", "--resume", *parquet), "--ray-address", "127.0.0.1:1"]) == 1
    assert main(on_ray(model, "stopped", "--resume")) == 2
    assert "output_format 'parquet', not 'jsonl'" in capsys.readouterr().err


def test_a_model_that_is_not_there(model: Path, ray_cluster: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(on_ray(model, "none", "--model", "nowhere", "--replicas", "1")) == 2
    error = capsys.readouterr().err.strip().splitlines()[-1]
    assert error.startswith("vllm score: error: ") and "nowhere" in error


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--replicas", "2"], "--replicas needs --backend ray"),
        (["--replica-cpus", "2"], "--replica-cpus needs --backend ray"),
        (["--ray-address", "auto"], "--ray-address needs --backend ray"),
        (["--output-format", "csv"], "--output-format needs --backend ray"),
        (["--backend", "ray", "--url", "http://127.0.0.1:1"], "--url and --backend ray exclude each other"),
        (["--backend", "ray", "--picture", "a.png"], "--picture and --backend ray exclude each other"),
        (["--backend", "ray", "--output", "whole.jsonl"], "--output whole.jsonl is a file"),
        (["--backend", "ray", "--output", "no/where"], "there is no folder no"),
        (["--backend", "ray", "--template", "{none}"], "a.jsonl:1: the template's field 'none' is not there"),
    ],
)
def test_refused_before_anything_starts(more: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["score", "a.jsonl", "--labels", "a", "b", *more]) == 2
    assert message in capsys.readouterr().err


def test_without_ray(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    assert main(["score", "a.jsonl", "--labels", "a", "b", "--backend", "ray"]) == 2
    assert 'pip install "ray[data]' in capsys.readouterr().err


def test_csv_cells(folder: Path) -> None:
    from vllm.scoring.columns import Columns, FieldKinds, failures
    from vllm.scoring.labels.records import Labels

    labels = Labels(["a", "b"], ["a", "b"], [[1], [2]])
    kinds = FieldKinds()
    fields = [{"text": "x", "n": 1, "mixed": "1", "big": 2**70}, {"text": "y", "n": None, "mixed": 1}]
    for row in fields:
        kinds.add(row)
    records = [
        {"index": 0, **fields[0], "probs": {"a": 0.25, "b": 0.75}, "num_prompt_tokens": 3},
        {"index": 1, **fields[1], "num_prompt_tokens": 0, "error": "no, not this"},
    ]
    path = folder / "part.csv"
    columns = Columns(kinds, labels.schema())
    path.write_bytes(columns.encode(records, "csv"))
    first, second = csv.DictReader(path.read_text().splitlines())
    assert (first["n"], first["mixed"], first["big"], first["error"]) == ("1", '"1"', str(2**70), "")
    assert json.loads(first["probs"]) == records[0]["probs"]
    assert (second["n"], second["mixed"], second["probs"]) == ("", "1", "")
    assert list(failures(path)) == [None, "no, not this"]
    lines = folder / "part.jsonl"
    lines.write_bytes(columns.encode(records, "jsonl"))
    assert list(failures(lines)) == [None, "no, not this"]
