"""FlashInfer: which engine gets it, what it is given, and that nothing waits; what becomes of it where it is wrong."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import attention_stand_ins as stand_ins
import pytest
import torch
from models_util import make_random_model
from pretend_cuda import pretending
from tiny_llm import is_empty, make_tiny_llm

from vllm import LLM, SamplingParams
from vllm.attention import flashinfer
from vllm.attention.backend import AttentionBackend
from vllm.attention.options import AttentionOptions, LayerKind
from vllm.attention.select import select_backend
from vllm.v1.worker.gpu.replay.make import Replay

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="it is for the pretended device")

Wrapper = stand_ins.BatchPrefillWithPagedKVCacheWrapper
PLAIN = LayerKind(8, 2, 64, AttentionOptions(0.125))
PROMPTS = [
    {"prompt_token_ids": [3 + (7 * place + length) % 90 for place in range(length)]} for length in (40, 1, 7, 61)
]


@pytest.fixture(autouse=True)
def installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "flashinfer", stand_ins)
    monkeypatch.setattr(flashinfer, "find_spec", lambda name: name)
    monkeypatch.setattr(Wrapper, "plans", 0)


def select(name: str = "auto", dtype: torch.dtype = torch.bfloat16, **fields: Any) -> AttentionBackend:
    given = {"head_dim": 64, "block_size": 16, "layers": [PLAIN], **fields}
    return select_backend(name, "cuda", dtype, **given)


def test_it_is_taken_where_it_works(vllm_log: pytest.LogCaptureFixture) -> None:
    with pretending():
        assert select().name == select("flashinfer").name == "flashinfer"
        assert select("paged").name == "paged"
    assert Wrapper.plans == 2 and not vllm_log.records


@pytest.mark.parametrize(
    "layer",
    [
        PLAIN._replace(options=AttentionOptions(0.125, window=4096)),
        PLAIN._replace(options=AttentionOptions(softcap=30.0), head_dim=128),
        PLAIN._replace(num_heads=2),
    ],
    ids=["window", "soft-cap", "all heads"],
)
def test_every_kind_of_layers_is_tried(layer: LayerKind) -> None:
    with pretending():
        assert select(layers=[PLAIN, PLAIN, layer]).name == "flashinfer"
    assert Wrapper.plans == 2


@pytest.mark.parametrize(
    "fields",
    [
        {"dtype": torch.float32},
        {"head_dim": 80},
        {"kv_dtype": torch.float8_e4m3fn},
        {"layers": [PLAIN._replace(options=AttentionOptions(sinks=torch.zeros(8)))]},
        {"layers": [PLAIN._replace(options=AttentionOptions(alibi_slopes=torch.zeros(8)))]},
    ],
    ids=["dtype", "head size", "8-bit cache", "sinks", "ALiBi"],
)
def test_what_it_lacks_is_left_to_our_kernels(fields: dict[str, Any]) -> None:
    with pretending():
        assert select(**fields).name == "paged"
        with pytest.raises(ValueError, match="attention_backend='flashinfer' cannot be used: "):
            select("flashinfer", **fields)
    assert not Wrapper.plans


def test_older_devices_and_batch_invariance_have_our_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    with pretending():
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (7, 5))
        assert select(dtype=torch.float16).name == "paged"
        with pytest.raises(ValueError, match="it needs compute capability 8.0, and the device has 7.5"):
            select("flashinfer", torch.float16)
    monkeypatch.setenv("VLLM_BATCH_INVARIANT", "1")
    with pretending():
        assert select().name == "paged"
        with pytest.raises(ValueError, match="VLLM_BATCH_INVARIANT=1 needs attention_backend='paged'"):
            select("flashinfer")
    assert not Wrapper.plans


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"bias": 0.1}, "gave other results than our own kernels, with heads of 64, scale=0.125, window=None"),
        ({"error": RuntimeError("no nvcc")}, "a trial call failed: no nvcc"),
        ({"plan": None}, "a trial call failed: 'NoneType' object is not callable"),
    ],
)
def test_what_is_wrong_is_named_at_the_start(
    change: dict[str, Any], reason: str, vllm_log: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in change.items():
        monkeypatch.setattr(Wrapper, name, value)
    with pretending():
        assert select().name == "paged"
        assert reason in vllm_log.text and "FlashInfer is installed" in vllm_log.text
        with pytest.raises(ValueError, match="attention_backend='flashinfer' cannot be used"):
            select("flashinfer")


def test_a_package_that_cannot_be_imported(vllm_log: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "flashinfer", None)
    with pretending():
        assert select().name == "paged"
    assert "cannot be imported" in vllm_log.text


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    sizes = {"head_dim": 64, "max_position_embeddings": 256}
    windows = {"sliding_window": 24, "layer_types": ["sliding_attention", "full_attention"]}
    made: dict[str, dict[str, Any]] = {"qwen3": {}, "gemma3_text": windows}
    return {
        arch: make_random_model(arch, "small", tmp_path_factory.mktemp(arch), **sizes, **fields)[0]
        for arch, fields in made.items()
    }


@contextmanager
def served(folder: Path, **fields: Any) -> Iterator[LLM]:
    """No step waits for the device, except for its results."""
    usual: dict[str, Any] = {"device": "cuda", "dtype": "bfloat16", "skip_tokenizer_init": True, "max_num_seqs": 2}
    usual |= {"max_num_batched_tokens": 48, "enable_prefix_caching": False}
    with pretending():
        yield make_tiny_llm(folder, **{**usual, **fields})


def readings(llm: LLM) -> list[Any]:
    params = [
        SamplingParams(temperature=0, max_tokens=3 + index, ignore_eos=True, logprobs=0, prompt_logprobs=0)
        for index in range(len(PROMPTS))
    ]
    outputs = llm.generate(PROMPTS, params, use_tqdm=False)
    assert is_empty(llm)
    return [(out.outputs[0].logprobs.logprobs, out.prompt_logprobs.logprobs) for out in outputs]


@pytest.fixture(scope="module")
def by_our_kernels(folders: dict[str, Path]) -> dict[str, list[Any]]:
    """Readings by architecture."""
    expected = {}
    for arch, folder in folders.items():
        with served(folder, attention_backend="paged") as llm:
            expected[arch] = readings(llm)
    return expected


def runner_of(llm: LLM) -> Any:
    return llm.llm_engine.engine_core.executor.worker.model_runner


@pytest.mark.parametrize("arch", ["qwen3", "gemma3_text"])
def test_an_engine_plans_steps_with_prompts_and_replays_decodes(
    arch: str,
    folders: dict[str, Path],
    by_our_kernels: dict[str, list[Any]],
    vllm_log: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Plans take pinned arrays of the host, which the stand-in copies as the library does: a wait is an error here. A
    step that cannot be planned is ours."""
    with served(folders[arch]) as llm:
        runner = runner_of(llm)
        assert runner._backend.name == "flashinfer"
        assert type(runner.replay) is not Replay and runner.replay.pieces._steps
        runner._forward = _not_waiting(runner._forward)
        Wrapper.plans = 0
        got = readings(llm)
        num_plans, num_groups = Wrapper.plans, len(runner.kv_layout.windows)
        monkeypatch.setattr(Wrapper, "error", RuntimeError("workspace is too small"))
        without = readings(llm)
    # Prompts come in at most two steps each; decodes alone have no plan.
    assert 0 < num_plans <= 2 * num_groups * len(PROMPTS)
    for own, other in zip(got, by_our_kernels[arch], strict=True):
        for mine, theirs in zip(own, other, strict=True):
            # bfloat16's roundings, of another order of sums.
            torch.testing.assert_close(torch.from_numpy(mine), torch.from_numpy(theirs), rtol=0, atol=0.1)
    assert vllm_log.text.count("workspace is too small") == 1
    for own, other in zip(without, by_our_kernels[arch], strict=True):
        assert all((mine == theirs).all() for mine, theirs in zip(own, other, strict=True))


def _not_waiting(forward: Any) -> Any:
    def run(batch: Any) -> Any:
        torch.cuda.set_sync_debug_mode("error")
        try:
            return forward(batch)
        finally:
            torch.cuda.set_sync_debug_mode("default")

    return run


def test_a_plan_waits_for_the_copies_of_the_last_but_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """The library's plans lie in pinned memory until the device comes to them."""
    waits: list[str] = []
    with pretending(), torch.inference_mode():
        monkeypatch.setattr(torch.cuda, "Event", lambda: _Event(waits))
        backend = select()
        assert isinstance(backend, flashinfer.FlashInferAttention)
        waits.clear()
        for _ in range(3):
            q, cache, attn = flashinfer.random_step(backend, torch.device("cuda"), torch.bfloat16, 8, 2, 64, 16)
            for _ in range(2):
                backend.attend(q, cache, attn, PLAIN.options)
    assert waits == ["first", "recorded", "first", "recorded", "second", "waited", "recorded"]


class _Event:
    def __init__(self, waits: list[str]) -> None:
        self._waits, self._records = waits, 0

    def query(self) -> bool:
        self._waits.append("second" if self._records else "first")
        return not self._records

    def record(self) -> None:
        self._records += 1
        self._waits.append("recorded")

    def synchronize(self) -> None:
        self._waits.append("waited")
