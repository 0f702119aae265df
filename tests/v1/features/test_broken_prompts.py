"""Keys and values that are not finite stay with the request whose step computed them, though no logits told of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from pretend_cuda import pretending
from tiny_llm import is_empty, make_tiny_llm, make_tiny_model

from vllm import LLM, SamplingParams
from vllm.v1.features.kv_events.messages import BlockRemoved, BlockStored
from vllm.v1.features.kv_events.scheduler import CacheEvents

PROMPT = {"prompt_token_ids": [3 + number * 7 % 200 for number in range(100)]}
READS = SamplingParams(max_tokens=3, temperature=0.0, ignore_eos=True, logprobs=4)
# A prompt takes four steps.
CHUNKED = {"max_num_batched_tokens": 32, "max_num_seqs": 4}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def expected(folder: Path) -> Any:
    return read(make_tiny_llm(folder, **CHUNKED))


def read(llm: LLM) -> tuple[int, Any]:
    """How much of the prompt was found, and its continuation."""
    (output,) = llm.generate(PROMPT, READS, use_tqdm=False)
    assert output.outputs[0].error is None
    return output.num_cached_tokens, [dict(each) for each in output.outputs[0].logprobs]


def spoil(llm: LLM, monkeypatch: pytest.MonkeyPatch, params: SamplingParams, num_steps: int, num_sound: int) -> None:
    """Run so many steps of a request and abort it, if it still runs; steps after the first `num_sound` compute NaN."""
    engine = llm.llm_engine
    decoder = engine.engine_core.executor.worker.model_runner.model.model
    inner, calls = decoder.embed, 0

    def embed(ids, positions):
        nonlocal calls
        calls += 1
        hidden = inner(ids, positions)
        return torch.full_like(hidden, torch.nan) if calls > num_sound else hidden

    with monkeypatch.context() as patch:
        patch.setattr(decoder, "embed", embed)
        engine.add_request("spoilt", PROMPT, params)
        for _ in range(num_steps):
            engine.step()
    # With async_scheduling one more is in flight.
    assert num_steps <= calls <= num_steps + 1
    engine.abort_request(["spoilt"])
    assert is_empty(llm)


@pytest.mark.parametrize(
    "fields", [{}, {"async_scheduling": True}, {"swap_space": 0.01}], ids=["sync", "async", "swap"]
)
@pytest.mark.parametrize("num_sound", [0, 1])
def test_a_request_that_ends_before_its_logits(folder, expected, fields, num_sound, monkeypatch):
    llm = make_tiny_llm(folder, **CHUNKED, **fields)
    spoil(llm, monkeypatch, READS, 3, num_sound)
    # The sound part may be forgotten with the rest.
    found, readings = read(llm)
    assert found <= 32 * num_sound and readings == expected[1]


def test_a_request_without_readings(folder, expected, monkeypatch):
    llm = make_tiny_llm(folder)
    spoil(llm, monkeypatch, SamplingParams(max_tokens=0), 1, 0)
    assert read(llm)[0] == 0
    assert read(llm)[0] > 0


def test_the_store_gets_none(folder, expected, tmp_path, monkeypatch):
    llm = make_tiny_llm(folder, kv_store=str(tmp_path), **CHUNKED)
    spoil(llm, monkeypatch, READS, 3, 1)
    llm.llm_engine.engine_core.shutdown()
    later = make_tiny_llm(folder, kv_store=str(tmp_path), **CHUNKED)
    assert read(later) == (0, expected[1])
    later.llm_engine.engine_core.shutdown()


def test_events_do_not_tell_of_it(folder, tmp_path, monkeypatch):
    config = {"enable_kv_cache_events": True, "endpoint": f"ipc://{tmp_path}/events"}
    llm = make_tiny_llm(folder, kv_events_config=config, **CHUNKED)
    (guest,) = (each for each in llm.llm_engine.engine_core.scheduler.guests if isinstance(each, CacheEvents))
    events: list[Any] = []
    monkeypatch.setattr(guest._publisher, "publish", lambda batch: events.extend(batch.events))
    spoil(llm, monkeypatch, READS, 3, 1)
    there: set[bytes] = set()
    for event in events:
        if isinstance(event, BlockStored):
            there |= set(event.block_hashes)
        elif isinstance(event, BlockRemoved):
            there -= set(event.block_hashes)
    assert not there
    read(llm)
    assert sum(len(event.block_hashes) for event in events if isinstance(event, BlockStored)) >= 100 // 16
    llm.llm_engine.engine_core.shutdown()


def test_a_pooling_model(folder, monkeypatch):
    llm = make_tiny_llm(folder, runner="pooling", convert="embed", **CHUNKED)
    decoder = llm.llm_engine.engine_core.executor.worker.model_runner.model.model
    (clean,) = llm.embed(PROMPT, use_tqdm=False)
    llm.reset_prefix_cache()
    inner, calls = decoder.embed, 0

    def embed(ids, positions):
        nonlocal calls
        calls += 1
        return inner(ids, positions) * (torch.nan if calls == 1 else 1.0)

    with monkeypatch.context() as patch:
        patch.setattr(decoder, "embed", embed)
        (broken,) = llm.embed(PROMPT, use_tqdm=False)
    assert "not finite" in broken.error.message
    (output,) = llm.embed(PROMPT, use_tqdm=False)
    assert output.num_cached_tokens == 0 and output.outputs.embedding == clean.outputs.embedding


def test_on_a_device_that_runs_ahead(folder, expected, monkeypatch):
    with pretending():
        llm = make_tiny_llm(folder, device="cuda", enforce_eager=True, **CHUNKED)
        assert llm.llm_engine.engine_core.executor.worker.device.type == "cuda"
        spoil(llm, monkeypatch, READS, 3, 0)
        found, readings = read(llm)
    assert found == 0
    for own, wanted in zip(readings, expected[1], strict=True):
        assert {each: reading.logprob for each, reading in own.items()} == pytest.approx(
            {each: reading.logprob for each, reading in wanted.items()}, abs=1e-4
        )
