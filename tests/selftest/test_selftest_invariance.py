"""No bit of a request's result depends on the batch composition, and a fault that made it depend would be found."""

from __future__ import annotations

import random
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from hypothesis import given
from models_util import ARCHITECTURES, make_random_model
from tiny_llm import is_empty

from vllm import LLM
from vllm.layers import attention
from vllm.layers.linear import LinearBase
from vllm.ops._dispatch import ISA_LEVELS
from vllm.selftest.invariance import Check, InvarianceTest, compare_bits
from vllm.selftest.probes import make_probes, result_of, run_probes
from vllm.v1.worker.gpu.sample import vocab

# An architecture adds layers; a dtype adds kernels.
ARCHITECTURES_AND_DTYPES = (
    *((arch, "bfloat16") for arch in ARCHITECTURES),
    ("llama", "float32"),
    ("opt", "float32"),
    ("qwen3", "float16"),
    ("opt", "float16"),
)
ALWAYS = ["alone again", *(f"batch composition {number}" for number in (1, 2, 3))]
CHUNKED = ["steps of 3 tokens", "steps of 16 tokens", "steps of 50 tokens"]
CACHED = ["one block cached", "half the blocks cached", "every block cached"]


@pytest.fixture(autouse=True)
def invariant(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_BATCH_INVARIANT", "1")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """A folder for each random model, made once."""
    made: dict[str, Path] = {}

    def get(arch: str, size: str = "odd", **overrides: Any) -> Path:
        key = f"{arch}-{size}-{overrides}"
        if key not in made:
            made[key], _ = make_random_model(arch, size, tmp_path_factory.mktemp("model"), **overrides)
        return made[key]

    return get


def load(folder: Path, dtype: str = "bfloat16", **fields: Any) -> LLM:
    limits = {"max_logprobs": -1, "max_logprob_token_ids": -1, "max_model_len": 128}
    return LLM(str(folder), dtype=dtype, skip_tokenizer_init=True, **{**limits, **fields})


def run(llm: LLM) -> list[Check]:
    checks = list(InvarianceTest(llm.llm_engine).run())
    assert is_empty(llm)
    return checks


def assert_passed(checks: list[Check]) -> None:
    assert [check.name for check in checks[:-1]] == [*ALWAYS, *CHUNKED, *CACHED, "preempted"]
    assert [check for check in checks if not check.passed] == []
    assert all(check.values > 1000 for check in checks)


@pytest.mark.parametrize(("arch", "dtype"), ARCHITECTURES_AND_DTYPES)
def test_every_architecture_and_dtype(arch: str, dtype: str, folder: Callable[..., Path]) -> None:
    assert_passed(run(load(folder(arch, "odd" if dtype == "float32" else "small"), dtype)))


def test_int8_weights(folder: Callable[..., Path]) -> None:
    assert_passed(run(load(folder("llama"), quantization="int8")))


def test_an_activation_that_pytorch_rounds_by_place(folder: Callable[..., Path]) -> None:
    assert_passed(run(load(folder("opt", activation_function="gelu_new"), "float32")))


def test_contexts_that_threads_share(folder: Callable[..., Path]) -> None:
    """Beyond 256 tokens attention's segments may be attended by several threads."""
    llm = load(folder("llama", "small", max_position_embeddings=512), max_model_len=512)
    assert max(len(probe.prompt) for probe in InvarianceTest(llm.llm_engine).probes) > 256
    assert_passed(run(llm))


@pytest.mark.parametrize("level", ISA_LEVELS[:-1])  # the tests above run at the widest, where the CPU has it
def test_every_instruction_set(level: str, folder: Callable[..., Path]) -> None:
    ops = torch.ops.vllm_cpu
    before = ops.set_isa(-1)
    try:
        if ops.set_isa(ISA_LEVELS.index(level)) != ISA_LEVELS.index(level):
            pytest.skip("the CPU or the library does not have it")
        assert_passed(run(load(folder("qwen3", "small"))))
    finally:
        ops.set_isa(before)


def test_neither_block_size_nor_limits_matter(folder: Callable[..., Path]) -> None:
    """The configurations that docs/invariance.md says do not matter, on one thread and two."""
    found = []
    probes = make_probes(503, 128, 16, random.Random(0))
    before = torch.get_num_threads()
    try:
        for threads, fields in ((1, {}), (2, {"block_size": 8}), (2, {"max_num_seqs": 2, "block_size": 32})):
            torch.set_num_threads(threads)
            llm = load(folder("llama"), **{"enable_prefix_caching": threads == 2, **fields})
            found.append([result_of(output) for output in run_probes(llm.llm_engine, probes)])
    finally:
        torch.set_num_threads(before)
    for others in found[1:]:
        for one, other in zip(found[0], others, strict=True):
            assert {name: compare_bits(array, other[name]) for name, array in one.items()} == dict.fromkeys(one)


def test_without_a_second_block_there_is_nothing_to_share(folder: Callable[..., Path]) -> None:
    names = [check.name for check in run(load(folder("llama", "small"), block_size=128))]
    assert names[:-1] == [*ALWAYS, *CHUNKED]
    names = [check.name for check in run(load(folder("llama", "small"), enable_prefix_caching=False))]
    assert names[:-1] == [*ALWAYS, *CHUNKED, "preempted"]


# -- faults ------------------------------------------------------------------------------------------------------


def _in_linear(change: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[pytest.MonkeyPatch], None]:
    plain = LinearBase.forward

    def plant(patch: pytest.MonkeyPatch) -> None:
        patch.setattr(LinearBase, "forward", lambda self, x, norm=None: change(plain(self, x, norm)))

    return plant


def _one_ulp_in_large_batches(out: torch.Tensor) -> torch.Tensor:
    return out * (1 + 2.0**-7) if len(out) > 40 else out


def _last_row_alike(out: torch.Tensor) -> torch.Tensor:
    if len(out) > 1:
        out[-1] = out[-1] * (1 + 2.0**-7)
    return out


def _by_distant_neighbours(out: torch.Tensor) -> torch.Tensor:
    return out + 2.0**-6 * out.mean(0)


def _noise_by_row(patch: pytest.MonkeyPatch) -> None:
    draw = vocab.draw
    patch.setattr(vocab, "draw", lambda x, t, seeds, at: draw(x, t, seeds + torch.arange(len(x)), at))


def _context_from_this_step(patch: pytest.MonkeyPatch) -> None:
    """Attention that scales by how many of a request's tokens the step brings, as a kernel that tiles them might."""
    attend = attention.Attention.forward

    def forward(self: Any, q: torch.Tensor, *rest: Any) -> torch.Tensor:
        out = attend(self, q, *rest)
        return out * (1 + 2.0**-7) if rest[3].max_query_len > 20 else out

    patch.setattr(attention.Attention, "forward", forward)


@pytest.mark.parametrize(
    ("plant", "found_by"),
    [
        (_in_linear(_one_ulp_in_large_batches), "steps of 3 tokens"),
        (_in_linear(_last_row_alike), "batch composition 1"),
        (_in_linear(_by_distant_neighbours), "batch composition 1"),
        (_noise_by_row, "batch composition 1"),
        (_context_from_this_step, "every block cached"),
    ],
    ids=["rows", "last row", "mean", "noise", "attention"],
)
def test_a_fault_is_found(
    plant: Callable[[pytest.MonkeyPatch], None], found_by: str, folder: Callable[..., Path], monkeypatch: Any
) -> None:
    plant(monkeypatch)
    checks = InvarianceTest(load(folder("llama", "small")).llm_engine).run()
    assert next(checks).passed
    failed = next(check for check in checks if check.name == found_by)
    assert not failed.passed
    assert 0 < failed.differing <= failed.values
    first = failed.first
    assert first is not None
    assert first.expected != first.got
    assert 0 < first.differing <= failed.differing


def test_what_was_not_reached_has_not_passed(folder: Callable[..., Path], monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.v1.core.kv_cache_manager import CachedPrefix, KVCacheManager

    monkeypatch.setattr(KVCacheManager, "find_prefix", lambda self, request: CachedPrefix())
    checks = {check.name: check for check in run(load(folder("llama", "small")))}
    assert [checks[name].passed for name in CACHED] == [False] * 3
    assert all(checks[name].differing == 0 for name in CACHED)
    assert "prefix cache" in str(checks[CACHED[0]].missed)


# -- comparing bits ----------------------------------------------------------------------------------------------


def floats() -> st.SearchStrategy[list[float]]:
    return st.lists(st.floats(width=32, allow_subnormal=True) | st.sampled_from([0.0, -0.0]), min_size=1, max_size=6)


@given(floats(), st.data())
def test_bits_are_compared_not_values(values: list[float], data: st.DataObject) -> None:
    others = [data.draw(st.just(value) | st.floats(width=32)) for value in values]
    expected = [a for a, b in zip(values, others, strict=True) if struct.pack("f", a) != struct.pack("f", b)]
    found = compare_bits(np.array(values, np.float32), np.array(others, np.float32))
    assert (found is None) == (not expected)
    if found is not None:
        index, ours, theirs, differing, _ = found
        assert index is not None
        assert (struct.pack("f", ours), differing) == (struct.pack("f", expected[0]), len(expected))
        assert struct.pack("f", theirs) == struct.pack("f", others[index])


def test_other_sizes_differ_throughout() -> None:
    assert compare_bits(np.zeros(3, np.int32), np.zeros(5, np.int32)) == (None, 3.0, 5.0, 5, None)


@pytest.fixture(autouse=True)
def same_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    assert torch.get_num_threads() == before
