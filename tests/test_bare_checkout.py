"""The engine without its compiled library and with no packages but torch, transformers and what those need."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from tiny_llm import make_tiny_model

from vllm.loader.resolve import embedded_model_path

ROOT = Path(__file__).parents[1]
# Run in a fresh interpreter: what is imported there is what the engine imports.
PRELUDE = """
import importlib.abc, json, sys
from pathlib import Path

ALLOWED = set(
    # Torch, Triton and transformers, then what they install.
    "torch torchgen functorch triton transformers tokenizers safetensors huggingface_hub numpy yaml _yaml regex tqdm "
    "packaging filelock fsspec hf_xet httpx httpcore h11 anyio idna certifi sniffio typer click shellingham "
    "typing_extensions sympy mpmath networkx jinja2 markupsafe setuptools vllm".split()
)

class Refuse(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        top = name.partition(".")[0]
        if top not in ALLOWED and top not in sys.stdlib_module_names:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Refuse())
import vllm.ops._dispatch
vllm.ops._dispatch.LIBRARY = Path("not-there")
"""
GENERATE = """
from vllm import LLM, SamplingParams
llm = LLM(sys.argv[1], dtype="float32", max_model_len=128, swap_space=0.001)
params = SamplingParams(max_tokens=4, temperature=0.7, seed=1, logprob_token_ids=[3, 5], prompt_logprobs=1)
(output,) = llm.generate(["hello"], params, use_tqdm=False)
rows = output.outputs[0].logprobs
assert len(rows) == 4 and all({3, 5} <= row.keys() for row in rows), rows
assert all(row[3].logprob < 0 and row[3].rank >= 1 for row in rows)
assert output.prompt_logprobs[0] is None and len(output.prompt_logprobs) == len(output.prompt_token_ids)
"""
ERRORS = """
import io
from contextlib import redirect_stderr
from vllm.cli.main import main

def message(function):
    try:
        function()
    except ModuleNotFoundError as error:
        return str(error)

said = io.StringIO()
with redirect_stderr(said):
    code = main(["serve", sys.argv[1]])
print(json.dumps([message(lambda: vllm.AsyncLLM), code, said.getvalue(), message(lambda: vllm.LLM(sys.argv[2]))]))
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("tiny"))


def run(code: str, cwd: Path, *arguments: Path) -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("VLLM_")}
    environment.update(PYTHONPATH=str(ROOT), HF_HUB_OFFLINE="1", XDG_CACHE_HOME=str(cwd))
    return subprocess.run(
        [sys.executable, "-c", PRELUDE + code, *map(str, arguments)],
        env=environment,
        cwd=cwd,
        capture_output=True,
        text=True,
        timeout=300,
    )


def test_offline_inference(folder, tmp_path):
    done = run(GENERATE, tmp_path, folder)
    assert done.returncode == 0, done.stderr
    assert "CPU kernels are not built; using PyTorch" in done.stderr


def test_what_is_missing_is_named(folder, tmp_path):
    gguf_file = embedded_model_path()
    assert gguf_file is not None
    done = run(ERRORS, tmp_path, folder, gguf_file)
    assert done.returncode == 0, done.stderr
    of_async, code, of_serve, of_gguf = json.loads(done.stdout)
    assert of_async == "vllm.AsyncLLM needs the package msgspec, which is not installed: pip install msgspec"
    assert (
        code == 1 and "vllm serve needs the package" in of_serve and "which is not installed: pip install" in of_serve
    )
    assert of_gguf == "a .gguf file needs the package gguf, which is not installed: pip install gguf"
