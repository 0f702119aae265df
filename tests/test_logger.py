"""The environment's say in how the logger `vllm` is set up."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SCRIPT = """
import logging
logging.basicConfig(format="root %(message)s")
from vllm.logger import init_logger
init_logger("vllm.x").warning("told")
init_logger("vllm.y").info("quiet")
"""


def run(**variables: str) -> subprocess.CompletedProcess[str]:
    env = {**{name: value for name, value in os.environ.items() if "VLLM_" not in name}, "PYTHONPATH": str(ROOT)}
    return subprocess.run([sys.executable, "-c", SCRIPT], env={**env, **variables}, capture_output=True, text=True)


@pytest.mark.parametrize(
    ("variables", "lines"),
    [
        ({}, ["[vllm.x] told"]),
        ({"VLLM_LOGGING_LEVEL": "info"}, ["[vllm.x] told", "[vllm.y] quiet"]),
        ({"VLLM_LOGGING_LEVEL": "ERROR"}, []),
        ({"VLLM_CONFIGURE_LOGGING": "0"}, ["root told"]),
    ],
)
def test_levels_and_handlers(variables, lines):
    result = run(**variables)
    assert result.returncode == 0
    shown = result.stderr.splitlines()
    assert len(shown) == len(lines)
    assert all(line.endswith(end) for line, end in zip(shown, lines, strict=True))


def test_a_file_sets_it_up(tmp_path):
    path = tmp_path / "logging.json"
    config = {
        "version": 1,
        "formatters": {"own": {"format": "own %(message)s"}},
        "handlers": {"err": {"class": "logging.StreamHandler", "formatter": "own"}},
        "loggers": {"vllm": {"handlers": ["err"], "level": "INFO", "propagate": False}},
    }
    path.write_text(json.dumps(config))
    assert run(VLLM_LOGGING_CONFIG_PATH=str(path)).stderr.splitlines() == ["own told", "own quiet"]
    path.write_text("{}")
    assert f"VLLM_LOGGING_CONFIG_PATH={path} cannot be used" in run(VLLM_LOGGING_CONFIG_PATH=str(path)).stderr
