"""Steps with prompts on CUDA, captured between attention calls: what they launch, and what they give."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from models_util import make_random_model
from pretend_cuda import SIZES, pretending
from pretend_tensors import PretendMode
from tiny_llm import is_empty, make_tiny_llm, make_tiny_model
from torch.utils._device import _device_constructors

from vllm import LLM, SamplingParams
from vllm.models.mlp import MLP
from vllm.v1.worker.gpu.replay.piecewise_graphs import PiecewiseGraphs, sizes_up_to

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="it is for the pretended device")

_NO_LAUNCHES = {"aten.empty", "aten.new_empty", "aten.empty_like", "aten.empty_strided"}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[int, Path]:
    """By number of layers."""
    return {
        count: make_tiny_model(tmp_path_factory.mktemp(f"layers{count}"), num_hidden_layers=count) for count in (2, 4)
    }


@contextmanager
def counting(monkeypatch: pytest.MonkeyPatch) -> Iterator[Counter[str]]:
    """Kernels that are launched, and replays of graphs."""
    counts: Counter[str] = Counter()
    launch, compute, graph_of = PretendMode.launch, PretendMode._compute, torch.cuda.CUDAGraph

    def counted_launch(self: Any, operation: Any, args: Any, kwargs: Any) -> Any:
        counts[operation.__name__] += self.recording is None
        return launch(self, operation, args, kwargs)

    def counted_compute(self: Any, func: Any, *rest: Any) -> Any:
        is_view = any(each.alias_info is not None and not each.alias_info.is_write for each in func._schema.returns)
        name = str(func.overloadpacket)
        counts[name] += self.recording is None and not is_view and name not in _NO_LAUNCHES
        return compute(self, func, *rest)

    replay = graph_of.replay

    def counted_replay(self: Any) -> None:
        counts["replay"] += 1
        replay(self)

    with monkeypatch.context() as patch:
        patch.setattr(PretendMode, "launch", counted_launch)
        patch.setattr(PretendMode, "_compute", counted_compute)
        patch.setattr(graph_of, "replay", counted_replay)
        yield counts


def prompts_of(*lengths: int) -> list[dict[str, list[int]]]:
    return [{"prompt_token_ids": [3 + (7 * place + length) % 90 for place in range(length)]} for length in lengths]


def launched(folder: Path, monkeypatch: pytest.MonkeyPatch, **fields: Any) -> Counter[str]:
    """Launches of a step with one prompt, which is read."""
    with counting(monkeypatch) as counts:
        llm = make_tiny_llm(folder, device="cuda", max_num_seqs=1, **fields)
        counts.clear()
        params = SamplingParams(max_tokens=1, temperature=0, prompt_logprobs=0)
        llm.generate(prompts_of(40), params, use_tqdm=False)
    return counts


@pytest.mark.parametrize(
    "fields", [{}, {"quantization": "fp8", "kv_cache_dtype": "fp8", "dtype": "bfloat16"}], ids=["plain", "8 bits"]
)
def test_launches_of_a_layer(fields: dict[str, Any], folders: dict[int, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """One replay and attention's, where each operation had its own."""
    counts = {}
    with pretending():
        for is_eager in (True, False):
            few, many = (launched(folders[count], monkeypatch, enforce_eager=is_eager, **fields) for count in (2, 4))
            counts[is_eager] = {name: (many[name] - few[name]) / 2 for name in many if many[name] > few[name]}
    assert counts[False] == {"paged_attention": 1, "replay": 1}
    assert counts[True].pop("paged_attention") == 1
    assert sum(counts[True].values()) >= 8 and "replay" not in counts[True]


def readings(llm: LLM, prompts: list[Any], **fields: Any) -> list[Any]:
    params = [
        SamplingParams(temperature=0, max_tokens=3 + index % 4, ignore_eos=True, logprobs=2, **fields)
        for index in range(len(prompts))
    ]
    outputs = llm.generate(prompts, params, use_tqdm=False)
    assert is_empty(llm)
    return [
        (out.outputs[0].token_ids, out.outputs[0].logprobs.logprobs, getattr(out.prompt_logprobs, "logprobs", None))
        for out in outputs
    ]


@pytest.mark.parametrize(
    ("arch", "fields"), [("qwen3", {"prompt_logprobs": 1}), ("gemma3_text", {"kv_cache_dtype": "fp8"})]
)
def test_readings_are_those_of_steps_that_are_not_captured(arch: str, fields: dict[str, Any], tmp_path: Path) -> None:
    """Prompts alone and beside decodes, of sizes that are padded and that are not."""
    folder, _ = make_random_model(arch, "small", tmp_path) if arch != "gemma3_text" else _windowed(tmp_path)
    kept = {"skip_tokenizer_init": True, "max_num_seqs": 6, "max_num_batched_tokens": 100}
    kept["kv_cache_dtype"] = fields.pop("kv_cache_dtype", "auto")
    prompts = prompts_of(16, 1, 37, 60, 5)
    with pretending():
        plain = readings(make_tiny_llm(folder, device="cuda", enforce_eager=True, **kept), prompts, **fields)
        llm = make_tiny_llm(folder, device="cuda", **kept)
        assert llm.llm_engine.engine_core.executor.worker.model_runner.replay.pieces._steps.keys() == set(SIZES)
        for own, other in zip(readings(llm, prompts, **fields), plain, strict=True):
            assert own[0] == other[0]
            for mine, theirs in zip(own[1:], other[1:], strict=True):
                if theirs is not None:
                    # Padding changes the order of float32 sums.
                    torch.testing.assert_close(torch.from_numpy(mine), torch.from_numpy(theirs), rtol=0, atol=2e-4)


def _windowed(folder: Path) -> tuple[Path, Any]:
    """Layers of two KV groups."""
    kinds = ["sliding_attention", "full_attention"]
    return make_random_model("gemma3_text", "small", folder, sliding_window=16, layer_types=kinds)


def test_layers_that_ask_for_requests_are_not_captured(
    folders: dict[int, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A layer that is no attention, and looks at the requests itself."""
    run = PiecewiseGraphs._run

    def keep(self: Any, size: int, cutting: Any, cut: Any) -> Any:
        with monkeypatch.context() as patch:
            patch.setattr(MLP, "forward", lambda mlp, x, norm: x * cutting.step.seq_lens)
            return run(self, size, cutting, cut)

    monkeypatch.setattr(PiecewiseGraphs, "_run", keep)
    with pretending():
        counts = launched(folders[2], monkeypatch)
    assert counts["paged_attention"] == 2 and not counts["replay"]


def test_sizes() -> None:
    assert sizes_up_to(8192) == [16, 32, 64, 96, 128, 192, 256, 320, 384, 448, 512]
    assert sizes_up_to(100) == [16, 32, 64, 96, 100] and sizes_up_to(7) == [7]


def test_nothing_of_the_device_is_left() -> None:
    """transformers asks torch.tensor where a context makes tensors."""
    _device_constructors.cache_clear()
    with pretending(), torch.device("cpu"):
        torch.zeros(1)
    with torch.device("meta"):
        assert torch.tensor([]).is_meta
