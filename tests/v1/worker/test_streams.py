"""The runner's streams wait for each other where they must: on the pretended device it is an error if they do not."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from pretend_cuda import pretending
from pretend_streams import StreamRace
from pretend_tensors import DEVICE
from tiny_llm import make_tiny_llm

from vllm import SamplingParams
from vllm.v1.features.swap.runner import KVSwap
from vllm.v1.worker.gpu.cuda import HostCopies


@pytest.fixture(autouse=True)
def cuda():
    with pretending():
        yield


def ones() -> torch.Tensor:
    return torch.ones(3, device=DEVICE)


def pinned(values: list[float]) -> torch.Tensor:
    return torch.tensor(values).pin_memory()


@pytest.mark.parametrize("waits", [True, False])
def test_a_stream_that_reads_what_another_one_writes_waits(waits: bool) -> None:
    stream, values = torch.cuda.Stream(), ones()
    if waits:
        stream.wait_stream(torch.cuda.current_stream())
    race = nullcontext() if waits else pytest.raises(StreamRace, match="stream 1 reads what stream 0 may still write")
    with race, torch.cuda.stream(stream):
        values + 1
    torch.cuda.synchronize()


@pytest.mark.parametrize("who_waits", ["stream", "host", None])
def test_a_stream_that_writes_what_another_one_reads_waits(who_waits: str | None) -> None:
    stream, values = torch.cuda.Stream(), ones()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        values + 1
    event = stream.record_event()
    if who_waits == "stream":
        torch.cuda.current_stream().wait_stream(stream)
    elif who_waits == "host":
        event.synchronize()
    race = pytest.raises(StreamRace, match="stream 0 writes what stream 1 may still read")
    with nullcontext() if who_waits else race:
        values.fill_(2)
    torch.cuda.synchronize()


def test_memory_that_another_stream_uses_is_not_given_back() -> None:
    stream = torch.cuda.Stream()
    for how in ("waits", "recorded", ""):
        values = ones()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            values + 1
        if how == "waits":
            torch.cuda.current_stream().wait_stream(stream)
        elif how == "recorded":
            values.record_stream(stream)
        view = values[1:]
        del values
        ones()
        del view
    with pytest.raises(StreamRace, match="memory of stream 0 was given back while stream 1 may use it"):
        ones()


def test_what_is_copied_to_the_host_is_there_when_it_has_waited() -> None:
    values = ones()
    host = pinned([0, 0, 0]).copy_(values, non_blocking=True)
    event = torch.cuda.Event()
    event.record()
    values.fill_(2)
    assert host.tolist() != [1, 1, 1]
    event.synchronize()
    assert host.tolist() == [1, 1, 1]
    # The device itself does one after the other.
    host.copy_(values, non_blocking=True)
    assert host.to(DEVICE, non_blocking=True).cpu().tolist() == [2, 2, 2]


@pytest.mark.parametrize("waits", [True, False])
def test_pinned_memory_stays_until_it_is_copied(waits: bool) -> None:
    host = pinned([0, 0, 0])
    host.to(DEVICE, non_blocking=True)
    if waits:
        torch.cuda.synchronize()
    host.numpy()[1] = 5
    with nullcontext() if waits else pytest.raises(StreamRace, match="pinned memory was changed"):
        torch.cuda.synchronize()


def decode(folder: Path, **fields: object) -> None:
    llm = make_tiny_llm(folder, device="cuda", max_num_seqs=4, **fields)
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, logprob_token_ids=[3, 5])
    prompts = [{"prompt_token_ids": [3 + index] * 40} for index in range(4)]
    for _ in range(2):
        llm.generate(prompts, params, use_tqdm=False)


@pytest.mark.parametrize("fields", [{}, {"num_gpu_blocks_override": 10, "swap_space": 1e-3}], ids=["all fit", "swap"])
def test_the_engines_streams_wait(folder: Path, fields: dict[str, object]) -> None:
    decode(folder, **fields)


def test_a_replay_that_does_not_wait_for_the_last_ones_copies_shows(folder, monkeypatch) -> None:
    monkeypatch.setattr(HostCopies, "fence", lambda self: None)
    with pytest.raises(StreamRace, match="writes what stream . may still read"):
        decode(folder)


def test_a_step_that_does_not_wait_for_its_blocks_shows(folder, monkeypatch) -> None:
    monkeypatch.setattr(KVSwap, "_await_copies", lambda self: None)
    with pytest.raises(StreamRace):
        decode(folder, num_gpu_blocks_override=10, swap_space=1e-3)
