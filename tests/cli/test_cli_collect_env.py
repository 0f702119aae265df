"""`vllm collect-env`."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import vllm
from vllm.cli import collect_env
from vllm.cli.main import main

LIBRARY = Path(vllm.__file__).parent / "_cpu_ops.so"


def test_json_and_text_say_the_same(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["collect-env", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["vllm"] == vllm.__version__
    assert found["python"] == platform.python_version()
    assert found["packages"]["torch"] == torch.__version__
    assert found["cpu"]["kernels_loaded"] == LIBRARY.exists()
    assert len(found["cuda"]["devices"]) == torch.cuda.device_count()
    assert main(["collect-env"]) == 0
    text = capsys.readouterr().out
    for name, value in {**found["packages"], "model": found["cpu"]["model"], "python": found["python"]}.items():
        assert f"{name}: {value or 'none'}\n" in text


def test_set_variables_are_told_but_no_secrets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_LOGGING_LEVEL", "INFO")
    monkeypatch.setenv("VLLM_API_KEY", "sesame")
    monkeypatch.setenv("OTHER", "unrelated")
    found = collect_env.collect()["environment"]
    assert found["VLLM_LOGGING_LEVEL"] == "INFO"
    assert found["VLLM_API_KEY"] == "(hidden)"
    assert "OTHER" not in found


def test_packages_that_are_not_there(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(collect_env, "_PACKAGES", ("no-such-package",))
    assert main(["collect-env"]) == 0
    assert "  no-such-package: none\n" in capsys.readouterr().out


def test_torch_is_told_with_its_build(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "__version__", "9.8.7+cu130")
    assert collect_env.collect()["packages"]["torch"] == "9.8.7+cu130"


def test_cuda_devices(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    device = SimpleNamespace(name="Big One", major=9, minor=0, total_memory=80 * 2**30)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: device)
    assert main(["collect-env"]) == 0
    assert "devices: Big One 9.0 80.0; Big One 9.0 80.0\n" in capsys.readouterr().out


@pytest.mark.skipif(not LIBRARY.exists(), reason="the C++ kernels are not built")
@pytest.mark.parametrize(
    ("name", "value", "isa", "fault"),
    [
        ("VLLM_CPU_ISA", "portable", "portable", None),
        ("VLLM_OPS", "reference", None, None),
        ("VLLM_CPU_ISA", "mmx", None, "VLLM_CPU_ISA must be one of"),
    ],
)
def test_kernels_as_the_environment_has_them(name: str, value: str, isa: str | None, fault: str | None) -> None:
    others = {each: known for each, known in os.environ.items() if not each.startswith("VLLM_")}
    command = [sys.executable, "-m", "vllm.cli.main", "collect-env", "--json"]
    result = subprocess.run(command, env={**others, name: value}, capture_output=True, text=True, timeout=60)
    assert result.returncode == 0, result.stderr
    found = json.loads(result.stdout)
    assert found["environment"] == {name: value}
    assert (found["cpu"]["kernels_isa"], found["cpu"]["kernels_loaded"]) == (isa, isa is not None)
    assert (fault is None) == ("kernels_fault" not in found["cpu"])
    assert (fault or "") in found["cpu"].get("kernels_fault", "")
