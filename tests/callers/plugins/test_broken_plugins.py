"""Packages whose general plug-ins want what is not here, beside the engine: it starts, and says what they want."""

from __future__ import annotations

import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest

SCRIPT = """
import sys
from vllm import LLM, SamplingParams
llm = LLM(sys.argv[1], dtype="float32")
(output,) = llm.generate([[70, 71]], SamplingParams(max_tokens=2, temperature=0), use_tqdm=False)
print("tokens", len(output.outputs[0].token_ids))
"""
PACKAGES = {"ms-swift": "swift_uembed", "vllm-beam-search-plugin": "beam_search", "vllm-factory": "collfm2"}


def run(folder: Path, environment: dict[str, str]) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", SCRIPT, str(folder)]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=False)


@pytest.mark.parametrize("package", PACKAGES)
def test_the_engine_starts_beside(package: str, tiny_model: Path, server_environment: dict[str, str]) -> None:
    try:
        metadata.distribution(package)
    except metadata.PackageNotFoundError:
        pytest.skip(f"{package} is not installed")
    done = run(tiny_model, {**server_environment, "VLLM_PLUGINS": PACKAGES[package]})
    assert done.returncode == 0, done.stderr
    assert "tokens 2" in done.stdout
    warnings = [line for line in done.stderr.splitlines() if "fails and is left out" in line]
    assert len(warnings) <= 1
    assert all(f"the plug-in {PACKAGES[package]} of vllm.general_plugins" in line for line in warnings)


def test_none_runs_where_none_is_named(tiny_model: Path, server_environment: dict[str, str]) -> None:
    done = run(tiny_model, {**server_environment, "VLLM_PLUGINS": ""})
    assert done.returncode == 0, done.stderr
    assert "plug-in" not in done.stderr
