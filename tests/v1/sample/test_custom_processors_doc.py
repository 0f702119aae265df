"""Every example of docs/custom_logits_processors.md runs."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest
from installed_package import install
from tiny_llm import make_tiny_llm

import vllm
from vllm import SamplingParams

PAGE = Path(__file__).parents[3] / "docs" / "custom_logits_processors.md"
BLOCKS = re.findall(r"```(\w+)\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
FILES = {match[1]: code for kind, code in BLOCKS if (match := re.match(r"# (\w+)\.py\n", code))}
SCRIPTS = [code for kind, code in BLOCKS if kind == "python" and code not in FILES.values()]
(PROJECT,) = [code for kind, code in BLOCKS if kind == "toml"]


@pytest.fixture
def files(tmp_path, monkeypatch):
    """The page's modules, importable."""
    for name, code in FILES.items():
        (tmp_path / f"{name}.py").write_text(code, encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    yield tmp_path
    for name in FILES:
        sys.modules.pop(name, None)


@pytest.mark.parametrize("number", range(len(SCRIPTS)))
def test_a_script(files, folder, monkeypatch, number):
    class SmallLLM(vllm.LLM):
        def __init__(self, model, **fields):
            assert model == "path/to/model"
            super().__init__(str(folder), dtype="float32", **fields)

        def generate(self, *args, **fields):
            return super().generate(*args, use_tqdm=False, **fields)

    monkeypatch.setitem(vars(vllm), "LLM", SmallLLM)
    assert "assert " in SCRIPTS[number]
    exec(compile(SCRIPTS[number], f"{PAGE.name}, script {number}", "exec"), {})


@pytest.mark.parametrize("name", FILES)
def test_a_module_forces_its_token(files, folder, name):
    (class_name,) = re.findall(r"^class (\w+)", FILES[name], re.MULTILINE)
    llm = make_tiny_llm(folder, logits_processors=[f"{name}:{class_name}"], max_num_seqs=2)
    params = [
        SamplingParams(max_tokens=1 + i, ignore_eos=True, seed=i, extra_args={"target_token": 50 + i} if i % 3 else {})
        for i in range(7)
    ]
    outputs = llm.generate(["a"] * 7, params, use_tqdm=False)
    for i, output in enumerate(outputs):
        assert (set(output.outputs[0].token_ids) == {50 + i}) == bool(i % 3)


def test_the_entry_point(files, folder):
    ((entry, value),) = re.findall(r'^(\S+) = "(\S+)"$', PROJECT, re.MULTILINE)
    module = value.partition(":")[0]
    install(files, module, FILES[module], {entry: value})
    llm = make_tiny_llm(folder)
    (output,) = llm.generate("a", SamplingParams(max_tokens=2, extra_args={"target_token": 42}), use_tqdm=False)
    assert output.outputs[0].token_ids == [42, 42]


def test_all_of_the_page_is_here():
    assert len(FILES) == 4 and len(SCRIPTS) == 4
