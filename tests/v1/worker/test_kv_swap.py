"""Copies of KV blocks in host memory: what they hold, and engines that live on them."""

from __future__ import annotations

import contextlib
import random
from pathlib import Path

import numpy as np
import pytest
import torch
from guests import guest_of
from pretend_cuda import pretending
from thread_ranks import ThreadExecutor
from tiny_llm import is_empty, make_tiny_llm

from vllm import LLM, RequestOutput, SamplingParams
from vllm.v1.engine import core
from vllm.v1.features.swap import runner as kv_swap
from vllm.v1.features.swap.runner import KVSwap
from vllm.v1.features.swap.scheduler import Swaps
from vllm.v1.worker.gpu.states import BlockCopies

BLOCK_BYTES = 2 * 2 * 2 * 16 * 16 * 4
"""A block of the tiny model in float32: layers, keys and values, heads, dimensions, tokens."""


@pytest.fixture(
    params=[
        "cpu",
        pytest.param("pretended", marks=pytest.mark.skipif(torch.cuda.is_available(), reason="there is a real one")),
        pytest.param(
            "real", marks=[pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")]
        ),
    ]
)
def device(request):
    with pretending() if request.param == "pretended" else contextlib.nullcontext():
        yield torch.device("cpu") if request.param == "cpu" else torch.device("cuda", 0)


def run(swap: KVSwap, swap_out=(), swap_in=(), block_copies=()) -> None:
    """The copies of a step, as the runner has them made."""
    swap.swap_out(list(swap_out))
    swap.blocks.copy(list(block_copies))
    swap.swap_in(list(swap_in))


# Sizes of the first layer's heads, and of the second's.
SIZES = (12, 12, 18, 18)


@pytest.mark.parametrize("piece_bytes", [2**30, 3 * 2 * sum(SIZES) * 4], ids=["one piece", "pieces"])
@pytest.mark.parametrize("staging_bytes", [2**26, 1], ids=["one turn", "turns"])
def test_copies_against_a_model(monkeypatch, device, piece_bytes, staging_bytes):
    monkeypatch.setattr(kv_swap, "_PIECE_BYTES", piece_bytes)
    monkeypatch.setattr(kv_swap, "STAGING_BYTES", staging_bytes)
    num_blocks, num_host_blocks = 7, 5
    generator = torch.Generator().manual_seed(0)
    expected = [torch.randn(num_blocks, 2, size, generator=generator) for size in SIZES]
    # A copy also on the CPU.
    tensors = [own.to(device, copy=True) for own in expected]
    swap = KVSwap(BlockCopies([tuple(tensors[:2]), tuple(tensors[2:])]), num_host_blocks)
    host = [torch.zeros(num_host_blocks, 2, size) for size in SIZES]
    rng = random.Random(0)
    known: set[int] = set()
    for _ in range(30):
        swap_out = list(
            zip(rng.sample(range(num_blocks), 3), rng.sample(range(num_host_blocks), rng.randint(0, 3)), strict=False)
        )
        known |= {host_block for _, host_block in swap_out}
        sources = rng.sample(sorted(known), rng.randint(0, len(known)))
        targets = rng.sample(range(num_blocks), len(sources) + 2)
        swap_in = list(zip(sources, targets, strict=False))
        copies = list(zip(rng.choices(range(num_blocks), k=2), targets[len(sources) :], strict=True))
        for own, copy in zip(expected, host, strict=True):
            for block, host_block in swap_out:
                copy[host_block] = own[block]
            read = [own[block].clone() for block, _ in copies]
            for (_, block), content in zip(copies, read, strict=True):
                own[block] = content
            for host_block, block in swap_in:
                own[block] = copy[host_block]
        if device.type == "cuda":
            torch.cuda._sleep(100_000)  # cycles in which the host runs ahead
        run(swap, swap_out, swap_in, copies)
        for own, tensor in zip(expected, tensors, strict=True):
            assert torch.equal(own, tensor.cpu())
        # The step's own writes.
        block = rng.randrange(num_blocks)
        for own, tensor in zip(expected, tensors, strict=True):
            own[block] = torch.randn(own.shape[1:], generator=generator)
            tensor[block] = own[block].to(device)


def test_an_engine_may_end_while_blocks_are_leaving(device):
    blocks = BlockCopies([(torch.ones(2, 8, device=device), torch.ones(2, 8, device=device))])
    swap = KVSwap(blocks, num_host_blocks=2)
    run(swap, swap_out=[(0, 1)])
    del swap, blocks
    # Where memory that somebody still read was given back, the pretended device says so.
    assert (torch.zeros(2, 8, device=device) == 0).all()


def workload() -> tuple[list[dict[str, list[int]]], list[SamplingParams]]:
    """Prompts of a few families, each a beginning in common; some read their prompts, all read what they generate."""
    rng = random.Random(1)
    beginnings = [rng.choices(range(3, 90), k=48) for _ in range(4)]
    prompts, params = [], []
    for _ in range(24):
        beginning = rng.choice(beginnings)[: rng.choice([16, 32, 48])]
        prompts.append({"prompt_token_ids": beginning + rng.choices(range(3, 90), k=rng.randint(1, 20))})
        reads = {"prompt_logprob_token_ids": [5, 7], "prompt_logprobs": 1} if rng.random() < 0.3 else {}
        params.append(
            SamplingParams(
                max_tokens=rng.randint(1, 40), temperature=0, logprob_token_ids=[3, 50], ignore_eos=True, **reads
            )
        )
    return prompts, params


def check_same(outputs: list[RequestOutput], expected: list[RequestOutput]) -> None:
    for output, wanted in zip(outputs, expected, strict=True):
        own, other = output.outputs[0], wanted.outputs[0]
        assert own.token_ids == other.token_ids
        # The same sums in another order: float32's rounding of logits around 1.
        for rows, other_rows in (own.logprobs, other.logprobs), (output.prompt_logprobs, wanted.prompt_logprobs):
            for row, other_row in zip(rows or (), other_rows or (), strict=True):
                assert (row is None) == (other_row is None)
                if row is not None:
                    assert row.keys() == other_row.keys()
                    np.testing.assert_allclose(
                        [row[token].logprob for token in row], [other_row[token].logprob for token in row], atol=2e-5
                    )


@pytest.fixture(scope="module")
def roomy(folder: Path) -> list[RequestOutput]:
    """The workload's outputs where there is room for everybody."""
    return make_tiny_llm(folder, device="cpu").generate(*workload(), use_tqdm=False)


def generate_tightly(folder: Path, num_host_blocks: int, **fields) -> tuple[LLM, list[RequestOutput]]:
    llm = make_tiny_llm(
        folder,
        num_gpu_blocks_override=11,
        max_num_batched_tokens=64,
        max_num_seqs=6,
        swap_space=num_host_blocks * BLOCK_BYTES / 2**30,
        **fields,
    )
    return llm, llm.generate(*workload(), use_tqdm=False)


@pytest.mark.parametrize("num_host_blocks", [3, 60])
def test_outputs_and_readings_are_those_of_an_engine_with_room(folder, roomy, num_host_blocks, device):
    llm, outputs = generate_tightly(folder, num_host_blocks, device=device.type)
    check_same(outputs, roomy)
    engine = llm.llm_engine.engine_core
    stats = engine.stats()
    assert engine.executor.num_host_blocks == guest_of(engine.scheduler, Swaps).host.num_blocks == num_host_blocks
    assert stats["num_preemptions"] > 3
    assert stats["num_swapped_out_blocks"] > 20
    assert stats["num_swapped_in_blocks"] > (10 if num_host_blocks == 60 else 0)
    assert (stats["host_cache_usage"] == 1) == (num_host_blocks == 3)
    assert is_empty(llm)


def test_every_rank_keeps_its_share(folder, roomy, monkeypatch):
    monkeypatch.setattr(core, "make_executor", ThreadExecutor)
    # A rank has one of the two heads: as many GiB hold twice as many blocks.
    llm, outputs = generate_tightly(folder, 30, tensor_parallel_size=2, device="cpu")
    check_same(outputs, roomy)
    engine = llm.llm_engine.engine_core
    assert engine.executor.num_host_blocks == 60 and engine.stats()["num_swapped_in_blocks"] > 10


def test_a_second_turn_comes_back_from_the_host(folder):
    llm = make_tiny_llm(folder, num_gpu_blocks_override=8, swap_space=20 * BLOCK_BYTES / 2**30)
    params = SamplingParams(max_tokens=1, temperature=0)
    first, other = [7] * 100, [9] * 100
    for prompt, num_cached in (first, 0), (other, 0), (first, 96), (other, 96):
        output = llm.generate({"prompt_token_ids": prompt}, params, use_tqdm=False)[0]
        assert output.num_cached_tokens == num_cached
    assert llm.reset_prefix_cache()
    output = llm.generate({"prompt_token_ids": first}, params, use_tqdm=False)[0]
    assert output.num_cached_tokens == 0


class TestSize:
    def test_more_than_the_host_has(self, folder):
        with pytest.raises(ValueError, match=r"swap_space=1e\+06 GiB for each of 1 devices is 1e\+06 GiB,"):
            make_tiny_llm(folder, swap_space=1e6)

    def test_less_than_a_block(self, folder):
        with pytest.raises(ValueError, match="swap_space=1e-09 GiB does not hold one KV block"):
            make_tiny_llm(folder, swap_space=1e-9)

    @pytest.mark.parametrize("value", [-1, float("nan"), float("inf"), "4", True])
    def test_no_size_at_all(self, folder, value):
        with pytest.raises(ValueError, match=r"swap_space must be (in \[0, inf\)|a number), got "):
            make_tiny_llm(folder, swap_space=value)

    def test_without_the_prefix_cache(self, folder):
        llm = make_tiny_llm(folder, swap_space=1e-3, enable_prefix_caching=False)
        assert llm.llm_engine.engine_core.executor.num_host_blocks == 0


def test_upstreams_name_of_the_size_is_that_of_all_devices(tmp_path):
    from vllm.engine.arg_utils import EngineArgs

    assert EngineArgs(kv_offloading_size=2.0).host_gib() == 2.0
    assert EngineArgs(kv_offloading_size=2.0, tensor_parallel_size=2, swap_space=1.0).host_gib() == 1.0
    assert EngineArgs(swap_space=3.0).host_gib() == 3.0 and EngineArgs(kv_offloading_backend="native").host_gib() == 0.0
    with pytest.raises(ValueError, match="kv_offloading_size=2 is 2 GiB a device, and swap_space=3"):
        EngineArgs(kv_offloading_size=2.0, swap_space=3.0).host_gib()
    with pytest.raises(ValueError, match="kv_offloading_backend must be 'native', got 'lmcache'"):
        EngineArgs(kv_offloading_size=2.0, kv_offloading_backend="lmcache").host_gib()
    with pytest.raises(ValueError, match="kv_offloading_size"):
        EngineArgs(kv_offloading_size=-1.0).host_gib()
