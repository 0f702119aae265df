"""Type checkers know listed modules by the stubs that a wheel brings."""

from __future__ import annotations

import subprocess
import sys
import venv
from pathlib import Path

import pytest

from vllm.upstream.stubs import stubs, write
from vllm.upstream.table import table

ROOT = Path(__file__).parents[2]

PROGRAM = """
import vllm.model_executor.models.llama as llama
from vllm.config import CacheConfig
from vllm.engine.arg_utils import EngineArgs
from vllm.engine.llm_engine import LLMEngine
from vllm.entrypoints.cli.main import main
from vllm.entrypoints.openai.completion.protocol import CompletionStreamResponse
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import KVCacheSpec
from vllm.v1.engine.llm_engine import LLMEngine as Same

engine: type[Same] = LLMEngine
reveal_type(LLMEngine.has_unfinished_requests)
reveal_type(main)
reveal_type(llama.LlamaForCausalLM)
reveal_type(CompletionStreamResponse)
reveal_type(CacheConfig)
KVCacheSpec().block_size
LLMEngine.nothing
"""


def has_file(module: str) -> bool:
    path = ROOT.joinpath(*module.split("."))
    return path.with_suffix(".py").exists() or (path / "__init__.py").exists()


def test_a_stub_for_every_listed_module():
    found = stubs(table())
    assert found["vllm.engine.llm_engine"].endswith("from vllm.v1.engine.llm_engine import *\n")
    assert found["vllm.model_executor"] == ""
    for module, text in found.items():
        compile(text, module, "exec")
    # A stub would hide what a module of ours itself has.
    missing = [module for module in table().rooms if module not in found and not has_file(module)]
    assert not missing


def test_mypy_resolves_names_by_upstreams_paths(tmp_path):
    pytest.importorskip("mypy")
    venv.create(tmp_path / "venv", with_pip=False)
    packages = next((tmp_path / "venv" / "lib").glob("python3*")) / "site-packages"
    (packages / "vllm").symlink_to(ROOT / "vllm")
    write(packages / "vllm-stubs")
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    python = tmp_path / "venv" / "bin" / "python"
    command = [sys.executable, "-m", "mypy", "--python-executable", python, "--ignore-missing-imports", "--strict"]
    result = subprocess.run([*command, program.name], cwd=tmp_path, capture_output=True, text=True)
    said = result.stdout
    for text in (
        'type is "def (self: vllm.v1.engine.llm_engine.LLMEngine) -> bool"',
        'type is "def (argv: typing.Sequence[str] | None =) -> int"',
        "-> vllm.models.dense.llama.LlamaForCausalLM",
        "-> vllm.server.protocol.generation.CompletionResponse",
        "-> vllm.config.cache.CacheConfig",
        '"KVCacheSpec" has no attribute "block_size"',
        '"type[LLMEngine]" has no attribute "nothing"',
        "Found 2 errors in 1 file",
    ):
        assert text in said, said + result.stderr


def test_a_wheel_has_the_table_and_the_stubs(tmp_path):
    command = [sys.executable, "setup.py", "-q", "egg_info", "--egg-base", tmp_path, "build_py", "--build-lib"]
    result = subprocess.run([*command, tmp_path / "lib"], cwd=ROOT, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    for name in ("vllm/upstream/names.toml", "vllm-stubs/py.typed", "vllm-stubs/engine/llm_engine.pyi"):
        assert (tmp_path / "lib" / name).is_file()
