"""`vllm selftest trainer`: what it prints, writes and returns."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from models_util import make_random_model

from vllm.cli.main import main
from vllm.layers.linear import LinearBase


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_random_model("llama", "small", tmp_path_factory.mktemp("model"))[0]


def selftest(folder: Path, *flags: str) -> int:
    small = ["--max-model-len", "64", "--num-prompts", "1", "--max-tokens", "4"]
    return main(["selftest", "trainer", str(folder), *small, *flags])


def test_a_sound_engine(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert selftest(folder, "--json", str(tmp_path / "r.json")) == 0
    shown = capsys.readouterr().out
    result = json.loads((tmp_path / "r.json").read_text())
    assert (result["selftest"], result["passed"], result["trainer_attention"]) == ("trainer", True, "eager")
    pairs = [(row["engine"], row["trainer"], row["passed"]) for row in result["rows"] if row["context"] is None]
    assert pairs == [
        ("float32", "float32", True),
        ("bfloat16", "float32", None),
        ("float32", "bfloat16", None),
        ("bfloat16", "bfloat16", None),
    ]
    for row in result["rows"]:
        assert f"{row['mean']:9.2e} {row['p99']:9.2e} {row['worst']:9.2e}" in shown
    assert shown.count("at most 0.001") == 2
    assert shown.splitlines()[-1].startswith("passed in")


def test_a_fault_is_reported(folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    plain = LinearBase.forward
    monkeypatch.setattr(LinearBase, "forward", lambda self, x, norm=None: plain(self, x, norm) * 1.01)
    assert selftest(folder, "--dtypes", "float32", "--trainers", "float32") == 1
    shown = capsys.readouterr().out
    assert "MORE THAN 0.001" in shown
    assert shown.splitlines()[-1].startswith("FAILED in")


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--dtype", "float32"], "--dtype: say which with --dtypes"),
        (["--max-tokens", "64"], "--max-tokens must be below max_model_len=64, got 64"),
        (["--json", "/nowhere/r.json"], "--json: there is no folder /nowhere"),
    ],
)
def test_what_cannot_be_tested(
    flags: list[str], message: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert selftest(folder, *flags) == 2
    assert message in capsys.readouterr().err
