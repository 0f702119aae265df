"""`import vllm` costs next to nothing; what is heavy is imported by those who use it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
HEAVY = {
    "torch",
    "transformers",
    "tokenizers",
    "safetensors",
    "gguf",
    "numpy",
    "tqdm",
    "triton",
    "jinja2",
    "matplotlib",
}


def imported_by(code: str) -> set[str]:
    """Top-level packages in sys.modules after a fresh interpreter ran `code`."""
    code += "\nimport json, sys; print(json.dumps(sorted({name.partition('.')[0] for name in sys.modules})))"
    result = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    return set(json.loads(result.stdout.splitlines()[-1]))


@pytest.mark.parametrize(
    ("code", "allowed"),
    [
        ("import vllm; vllm.__version__; dir(vllm)", set()),
        ("from vllm import SamplingParams; SamplingParams(logprob_token_ids=[1], stop='a')", {"numpy"}),
        ("from vllm import RequestOutput, CompletionOutput, TokensPrompt", {"numpy"}),
        ("from vllm import EngineArgs; EngineArgs()", {"numpy"}),
        ("import vllm.cli.main", {"numpy"}),
    ],
)
def test_light_imports_stay_light(code, allowed):
    assert imported_by(code) & HEAVY <= allowed


def test_every_exported_name_is_there():
    code = "import vllm\nfor name in vllm.__all__: getattr(vllm, name)\nfrom vllm import *"
    assert "transformers" not in imported_by(code)


def test_a_name_that_is_not_there():
    import vllm

    with pytest.raises(AttributeError, match="no attribute 'Nothing'"):
        _ = vllm.Nothing
