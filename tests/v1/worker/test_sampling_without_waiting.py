"""Sampling on a device never waits for it, whatever the requests ask, and draws the tokens that the CPU draws."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from pretend_cuda import pretending
from pretend_tensors import PretendTensor
from sampling_harness import EOS, VOCAB, random_logits

from vllm.sampling_params import SamplingParams
from vllm.v1.worker.gpu.sample.output import SamplerOutput
from vllm.v1.worker.gpu.sample.sampler import Sampler
from vllm.v1.worker.gpu.states import RequestStates

IDS = [7, 0, 198, 33]
PARAMS = {
    "greedy": dict(temperature=0),
    "ids": dict(temperature=0, logprob_token_ids=IDS),
    "most_likely": dict(temperature=0, logprobs=3, logprob_token_ids=IDS[:2]),
    "entropy": dict(temperature=0, logprob_entropy=True, logprob_token_ids=IDS),
    "draws": dict(temperature=0.7, seed=5, logprobs=2),
    "top_k": dict(seed=6, top_k=5),
    "top_p": dict(seed=7, top_p=0.6),
    "top_k_and_top_p": dict(seed=8, top_k=20, top_p=0.6),
    "min_p": dict(seed=9, min_p=0.1),
    "penalties": dict(seed=10, repetition_penalty=1.5, frequency_penalty=0.5, presence_penalty=0.25),
    "bias": dict(seed=11, logit_bias={3: 5.0, 9: -5.0}),
    "allowed": dict(seed=12, allowed_token_ids=[4, 8, 15]),
    "min_tokens": dict(temperature=0, min_tokens=9, stop_token_ids=[11]),
    "bad_words": dict(temperature=0),
    "beam": dict(temperature=0, allowed_token_ids=[4, 8, 15, 99], logprobs=3),
    "raw_of_nothing": dict(max_tokens=0, allowed_token_ids=[2], logprobs=1),
    "processed": dict(seed=13, top_k=5, logprobs=2, logprobs_mode="processed_logprobs", logprob_token_ids=IDS),
}


def params_of(name: str) -> SamplingParams:
    params = SamplingParams(**PARAMS[name])  # type: ignore[arg-type]
    if name == "bad_words":
        params._bad_words_token_ids = [[5], [3, 6]]
    if name == "beam":
        params._beam_length = 1
    return params


def sample(names: list[str], device: torch.device, logits: torch.Tensor, in_slots_of_others: bool) -> SamplerOutput:
    """One step of these requests, of which each gets a row of `logits`."""
    num_slots = 2 * len(names)
    model_config = SimpleNamespace(
        vocab_size=VOCAB, seed=0, hf_config=SimpleNamespace(eos_token_ids=EOS), logits_processors=()
    )
    config = SimpleNamespace(model_config=model_config, scheduler_config=SimpleNamespace(max_num_seqs=num_slots))
    states = RequestStates(num_slots, 32, device)
    sampler = Sampler(config, device)
    if in_slots_of_others:
        for name in reversed(names):
            slot = states.add_request(name, [1], 1, 0)
            sampler.add_request(slot, params_of(name), name)
        sampler.apply_staged_writes()
        for name in names:
            slot = states.remove_request(name)
            assert slot is not None
            sampler.remove_request(slot)
    slots = []
    for row, name in enumerate(names):
        slots.append(states.add_request(name, [3, 4, 5 + row, 3], 2, 0))
        sampler.add_request(slots[-1], params_of(name), name)
    sampler.apply_staged_writes()
    return sampler(logits, np.array(slots, dtype=np.int64), states)


def assert_same(got: SamplerOutput, wanted: SamplerOutput) -> None:
    assert torch.equal(got.sampled_token_ids, wanted.sampled_token_ids)
    torch.testing.assert_close(got.health, wanted.health, rtol=1e-5, atol=1e-5)
    assert len(got.logprobs) == len(wanted.logprobs)
    for (rows, own), (other_rows, other) in zip(got.logprobs, wanted.logprobs, strict=True):
        assert list(rows) == list(other_rows)
        for row in np.flatnonzero(np.asarray(rows) >= 0).tolist():
            assert torch.equal(own.logprob_token_ids[row], other.logprob_token_ids[row])
            assert torch.equal(own.ranks[row], other.ranks[row])
            torch.testing.assert_close(own.logprobs[row], other.logprobs[row], rtol=1e-5, atol=1e-5)


def on_host(output: SamplerOutput) -> SamplerOutput:
    def moved(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to("cpu")

    logprobs = [
        (rows, type(tensors)(*(moved(part) if isinstance(part, torch.Tensor) else part for part in tensors)))
        for rows, tensors in output.logprobs
    ]
    return SamplerOutput(moved(output.sampled_token_ids), moved(output.health), logprobs)


BATCHES = [[name] for name in PARAMS] + [list(PARAMS)]


@pytest.fixture(
    params=[
        pytest.param("pretended", marks=pytest.mark.skipif(torch.cuda.is_available(), reason="there is a real one")),
        pytest.param("real", marks=pytest.mark.gpu),
    ]
)
def cuda(request: pytest.FixtureRequest) -> Iterator[torch.device]:
    """A CUDA device, where there is none a pretended one."""
    with contextlib.nullcontext() if request.param == "real" else pretending(interpreted=True):
        yield torch.device("cuda", 0)


@pytest.mark.parametrize("names", BATCHES, ids=lambda names: names[0] if len(names) == 1 else "all")
def test_nothing_waits(names: list[str], cuda: torch.device) -> None:
    logits = random_logits(len(names), seed=len(names))
    there = logits.to(cuda)
    if not isinstance(there, PretendTensor):
        sample(names, cuda, there, len(names) > 1)  # compiles
    torch.cuda.set_sync_debug_mode("error")
    try:
        output = sample(names, cuda, there, len(names) > 1)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert_same(on_host(output), sample(names, torch.device("cpu"), logits, len(names) > 1))
