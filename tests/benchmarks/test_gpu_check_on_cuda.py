"""The GPU check's cases on a pretended CUDA device: what they do there, which they do not do on a CPU, is run before a
GPU is there."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from pretend_cuda import pretending
from pretend_tensors import held, there
from torch.utils._python_dispatch import _disable_current_modes

from vllm.ops.triton import descriptors

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="it is for the pretended device")

ROOT = Path(__file__).resolve().parents[2]
# By part, the rows that a CPU has none of.
ROWS = {
    "card": set(),
    "kernels": set(),
    "readings": {"prompt_readings_described", "prompt_readings_tiles"},
    "attention": set(),
    "engine": {"decode_host_share", "prompt_host_share", "pieces"},
}


@pytest.mark.parametrize("part", ROWS)
def test_every_case_runs_on_a_pretended_device(
    part: str, benchmark_module: Callable[[str], ModuleType], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # It asks torch.cuda for types when it is imported.
    import transformers.models.qwen3.modeling_qwen3  # noqa: F401

    monkeypatch.syspath_prepend(str(ROOT / "tests" / "ops"))
    monkeypatch.setattr(descriptors, "architecture", lambda: 90)
    monkeypatch.setattr(descriptors, "are_fetched", lambda: True)
    rates = {"copy_bytes_per_second": 1e9, "matrix_flops_per_second": 1e9}
    tiny = benchmark_module("gpu.sizes").TINY
    setting = benchmark_module("gpu.setting").Setting(torch.device("cuda"), tiny, 5, tmp_path, rates)
    module = benchmark_module(benchmark_module("gpu.child").PARTS[part])
    if part == "engine":
        monkeypatch.setattr(module, "load_in_transformers", lambda *args: _OnCpu(benchmark_module, *args))
    timing = benchmark_module("gpu.timing")
    flush_cache = timing._flush_cache
    # It writes a GiB.
    monkeypatch.setattr(timing, "_flush_cache", lambda: None)
    with pretending():
        if part == "card":
            flush_cache()
        cases = module.make_cases(setting)
        results = {name: case() for name, case in cases.items()}
    json.dumps(results)
    assert ROWS[part] <= {row["row"] for result in results.values() for row in result.get("rows", ())}


class _OnCpu:
    """transformers' model, which the pretended device does not know, on the CPU."""

    def __init__(self, benchmark_module: Callable[[str], ModuleType], folder: Path, _: Any, *rest: Any) -> None:
        self._model = benchmark_module("gpu.model_folder").load_in_transformers(folder, torch.device("cpu"), *rest)

    def __call__(self, input_ids: torch.Tensor, **options: Any) -> Any:
        with _disable_current_modes():
            return SimpleNamespace(logits=there(self._model(held(input_ids), **options).logits))

    def generate(self, input_ids: torch.Tensor, attention_mask: torch.Tensor, **options: Any) -> torch.Tensor:
        with _disable_current_modes():
            return self._model.generate(input_ids=held(input_ids), attention_mask=held(attention_mask), **options)


def test_every_row_of_the_page_is_measured(benchmark_module: Callable[[str], ModuleType]) -> None:
    page = (ROOT / "docs" / "performance.md").read_text(encoding="utf-8")
    section = page.partition("| row | to reach |")[2].partition("\n\n")[0]
    named = [line.split("|")[1].partition(":")[0] for line in section.splitlines()[2:]]
    rows = {row for names in named for row in names.split("`")[1::2]}
    sources = "".join(path.read_text(encoding="utf-8") for path in sorted((ROOT / "benchmarks" / "gpu").glob("*.py")))
    assert len(rows) >= 15
    for row in rows:
        name = row.partition("*")[0].rstrip("_0123456789")
        assert f'"{name}' in sources, row
