"""`vllm cache`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from models_util import load_model, make_random_model
from packed_starts import files, needs_kernels, packed  # noqa: F401 - a fixture

from vllm.cli.main import main
from vllm.utils.packed.file import read_content

pytestmark = needs_kernels


@pytest.fixture
def models(tmp_path: Path, packed: Path) -> Path:  # noqa: F811
    make_random_model("llama", "small", tmp_path / "model")
    load_model(tmp_path / "model")
    load_model(tmp_path / "model", dtype="bfloat16", quantization="int8")
    return packed


def test_what_is_there_is_listed(models: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["cache", "list"]) == 0
    text = capsys.readouterr().out
    assert "model  bfloat16, int8, " in text and "model  float32, " in text and str(models) in text
    assert main(["cache", "list", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert {row["quantization"] for row in found["entries"]} == {None, "int8"}
    assert {row["file"] for row in found["entries"]} == set(map(str, files(models)))


def test_damage_is_found_and_removed(models: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["cache", "verify"]) == 0
    assert capsys.readouterr().out.count("whole") == 2
    first, second = files(models)
    data = bytearray(first.read_bytes())
    data[read_content(first).pieces[0].start] ^= 1
    first.write_bytes(data)
    assert main(["cache", "verify", "--json"]) == 1
    found = {row["file"]: row["damage"] for row in json.loads(capsys.readouterr().out)["entries"]}
    assert "is damaged" in found[str(first)] and found[str(second)] is None
    assert files(models) == [second]


def test_all_is_removed(models: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (models / "0123-0of1.part").write_text("left by a process that was killed")
    assert main(["cache", "clear"]) == 0
    assert "removed 2 files" in capsys.readouterr().out
    assert not list(models.iterdir())
    assert main(["cache", "list"]) == 0
    assert main(["cache", "verify"]) == 0


def test_a_file_that_is_no_entry_is_told(models: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (models / "0123-0of1.packed").write_text("no packed weights")
    assert main(["cache", "list"]) == 0
    assert "0123-0of1.packed: 0123-0of1.packed is cut" in capsys.readouterr().out


def test_nothing_is_kept(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("VLLM_PACKED_CACHE", "0")
    assert main(["cache", "list"]) == 2
    assert "VLLM_PACKED_CACHE=0" in capsys.readouterr().err
