"""Plug-ins: when they run, which do, and what becomes of one that fails."""

from __future__ import annotations

import logging
import sys
from importlib import metadata

import pytest
from tiny_llm import make_tiny_model

from vllm import LLM, SamplingParams
from vllm.engine.arg_utils import EngineArgs
from vllm.utils import plugins
from vllm.utils.plugins import DEFAULT_PLUGINS_GROUP

CALLED: list[str] = []


def called() -> None:
    CALLED.append("called")


def wants_an_engine() -> None:
    EngineArgs()
    CALLED.append("wants_an_engine")


def raises() -> None:
    raise RuntimeError("no such thing as theirs")


def exits() -> None:
    sys.exit("their GPU is missing")


@pytest.fixture
def entries(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """References of entry points, by whose last words they are named; to be filled by the test."""
    found, references = metadata.entry_points, []

    def entry_points(**params: str) -> object:
        if params.get("group") != DEFAULT_PLUGINS_GROUP:
            return found(**params)
        return [metadata.EntryPoint(each.rpartition(":")[2], each, DEFAULT_PLUGINS_GROUP) for each in references]

    monkeypatch.setattr(metadata, "entry_points", entry_points)
    monkeypatch.setattr(plugins, "_has_loaded_general", False)
    monkeypatch.delenv("VLLM_PLUGINS", raising=False)
    CALLED.clear()
    return references


def test_plugins_run_once_before_arguments_are_read(entries):
    entries += [f"{__name__}:wants_an_engine", f"{__name__}:called"]
    EngineArgs()
    assert CALLED == ["wants_an_engine", "called"]
    EngineArgs()
    assert CALLED == ["wants_an_engine", "called"]


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        ("", []),
        ("called", ["called"]),
        ("wants_an_engine, called", ["wants_an_engine", "called"]),
        ("another", []),
    ],
)
def test_only_the_named_ones_run(entries, monkeypatch, names, expected):
    entries += [f"{__name__}:wants_an_engine", f"{__name__}:called"]
    monkeypatch.setenv("VLLM_PLUGINS", names)
    EngineArgs()
    assert expected == CALLED


@pytest.mark.parametrize(
    ("reference", "wanted"),
    [
        ("no_such_package.part:register", "No module named 'no_such_package'"),
        (f"{__name__}:no_such_function", "no_such_function"),
        (f"{__name__}:raises", "no such thing as theirs"),
        (f"{__name__}:exits", "their GPU is missing"),
    ],
)
def test_one_that_fails_is_one_warning_and_the_engine_starts(entries, caplog, tmp_path, reference, wanted):
    entries += [reference, f"{__name__}:called"]
    with caplog.at_level(logging.WARNING):
        llm = LLM(str(make_tiny_model(tmp_path / "model")))
    warnings = [record.getMessage() for record in caplog.records if "plug-in" in record.getMessage()]
    assert len(warnings) == 1
    assert wanted in warnings[0] and reference.rpartition(":")[2] in warnings[0]
    assert CALLED == ["called"]
    assert llm.generate([[1, 2, 3]], SamplingParams(max_tokens=1), use_tqdm=False)
