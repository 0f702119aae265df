"""The examples run, and print what they promise."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

import pytest

from vllm import LLM

EXAMPLES = Path(__file__).parents[2] / "examples"


def test_the_offline_example_runs(
    llm: LLM, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["offline_logprob_token_ids.py"])
    monkeypatch.setattr("vllm.LLM", lambda model: llm)
    runpy.run_path(str(EXAMPLES / "offline_logprob_token_ids.py"), run_name="__main__")
    out = capsys.readouterr().out
    assert all(f"{label!r} " in out for label in (" Yes", " No", " A", " B", " C", " D"))
    assert out.count("label mass: 0.") == 2
