"""`vllm selftest invariance`: what it prints, writes and returns."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from models_util import make_random_model

from vllm.cli.main import main
from vllm.layers.linear import LinearBase


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_random_model("llama", "small", tmp_path_factory.mktemp("model"))[0]


def selftest(folder: Path, *flags: str) -> int:
    return main(["selftest", "invariance", str(folder), "--skip-tokenizer-init", "--max-model-len", "128", *flags])


def test_a_sound_engine(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("VLLM_BATCH_INVARIANT", raising=False)
    assert selftest(folder, "--dtype", "bfloat16", "--repeats", "2", "--json", str(tmp_path / "r.json")) == 0
    assert "VLLM_BATCH_INVARIANT" not in os.environ
    shown = capsys.readouterr().out
    result = json.loads((tmp_path / "r.json").read_text())
    assert result["passed"] is True
    assert (result["selftest"], result["dtype"]) == ("invariance", "bfloat16")
    for check in result["checks"]:
        assert check["name"] in shown
        assert (check["passed"], check["differing"], check["first"], check["missed"]) == (True, 0, None, None)
    assert shown.count("identical") == len(result["checks"])
    for name in ("scoring", "decode"):
        cost = result["cost"][name]
        assert [len(cost[f"{side}_seconds"]) for side in ("default", "invariant")] == [2, 2]
        pairs = zip(cost["invariant_seconds"], cost["default_seconds"], strict=True)
        ratios = [ours / theirs for ours, theirs in pairs]
        assert (cost["ratio"]["min"], cost["ratio"]["max"]) == (min(ratios), max(ratios))
        assert f"{cost['ratio']['median']:.3f}" in shown
    assert shown.splitlines()[-1].startswith("passed in")


def test_a_fault_is_reported(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = LinearBase.forward
    monkeypatch.setattr(
        LinearBase, "forward", lambda self, x, norm=None: plain(self, x, norm) * (1 + 2.0**-6 * (len(x) > 1))
    )
    assert selftest(folder, "--repeats", "0", "--json", str(tmp_path / "r.json")) == 1
    shown = capsys.readouterr().out
    result = json.loads((tmp_path / "r.json").read_text())
    assert result["passed"] is False
    assert "cost" not in result
    failed = [check for check in result["checks"] if not check["passed"]]
    assert failed
    first = failed[0]["first"]
    assert f"DIFFERENT in {failed[0]['differing']:,} values" in shown
    assert f"first difference, {failed[0]['name']}: request {first['probe']} ({first['kind']}" in shown
    assert f"{first['field']}[{first['index']}]: {first['expected']!r} alone, {first['got']!r} here" in shown
    assert shown.splitlines()[-1].startswith("FAILED in")


@pytest.mark.parametrize(
    ("flags", "environment", "message"),
    [
        (["--max-model-len", "8"], {}, "max_model_len must be at least 16, got 8"),
        (["--json", "/nowhere/r.json"], {}, "--json: there is no folder /nowhere"),
        ([], {"VLLM_OPS": "reference"}, "VLLM_BATCH_INVARIANT=1 cannot be kept: VLLM_OPS=reference"),
    ],
)
def test_what_cannot_be_tested(
    flags: list[str],
    environment: dict[str, str],
    message: str,
    folder: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert selftest(folder, *flags) == 2
    assert message in capsys.readouterr().err
