"""AsyncLLM over two replicas: what one engine gives, from both of them, and what happens when one dies."""

from __future__ import annotations

import asyncio
import os
import random
import signal
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from byte_tokenizer import VOCAB_SIZE
from models_util import random_prompts
from readings_reference import assert_same_readings
from tiny_llm import make_tiny_llm

from vllm import LLM, AsyncEngineArgs, AsyncLLM, EngineArgs, RequestOutput, SamplingParams
from vllm.config import ParallelConfig
from vllm.exceptions import EngineDeadError, VLLMValidationError
from vllm.utils.device import usable_cores

pytestmark = pytest.mark.skipif(usable_cores() < 2, reason="every replica's process needs a core")

LONG = SamplingParams(max_tokens=100, ignore_eos=True)


@contextmanager
def running(folder: Path, **fields):
    options = {"dtype": "float32", "max_model_len": 128, "max_logprobs": -1, "data_parallel_size": 2, **fields}
    engine = AsyncLLM.from_engine_args(AsyncEngineArgs(str(folder), **options))
    try:
        yield engine
    finally:
        engine.shutdown()


@pytest.fixture(scope="module")
def engine(folder):
    """For tests that leave it as it was, with what runs a coroutine in its loop."""
    loop = asyncio.new_event_loop()
    with running(folder) as engine:
        yield engine, loop.run_until_complete
    # Tasks that the engine's end cancelled end, too.
    loop.run_until_complete(asyncio.sleep(0))
    loop.close()


async def last_of(engine: AsyncLLM, prompt, params: SamplingParams, request_id: str):
    output = None
    async for each in engine.generate(prompt, params, request_id):
        output = each
    return output


async def assert_empty(engine: AsyncLLM) -> None:
    for replica in engine.replicas:
        assert not await replica.core.call("has_unfinished_requests")
        assert not replica.streams and replica.num_unfinished_sequences == 0
    assert engine.num_unfinished_requests == engine.num_unfinished_sequences == 0
    assert engine._router.loads == [0, 0]


def num_finished(engine: AsyncLLM, reason: str) -> list[float | None]:
    registries = [replica.metrics.registry for replica in engine.replicas]
    return [each.get_sample_value("vllm:request_success_total", {"finished_reason": reason}) for each in registries]


def test_everything_equals_the_offline_engine(folder, engine):
    engine, run = engine
    kinds = [
        {"temperature": 0, "logprob_token_ids": [5, 9, 11], "logprobs": 2},
        {"logprobs": 3, "prompt_logprobs": 1, "logprob_entropy": True},
        {"seed": 2, "n": 3, "logprobs": 0},
        {"max_tokens": 0, "prompt_logprob_token_ids": [7, 8], "logprob_token_ids": [4]},
        {"seed": 3, "best_of": 3},
    ]
    params = [SamplingParams(**{"max_tokens": 6, "ignore_eos": True, **kinds[i % len(kinds)]}) for i in range(30)]
    prompts = random_prompts(VOCAB_SIZE, tuple(random.Random(0).choices(range(1, 60), k=30)), seed=3)
    llm = make_tiny_llm(folder)
    # Unseeded requests draw from the engine's seed and their names: those of LLM are their numbers.
    expected = llm.generate(prompts, params, use_tqdm=False)
    before = num_finished(engine, "length")

    async def ask():
        each = zip(expected, prompts, params, strict=True)
        return await asyncio.gather(*(last_of(engine, p, own, one.request_id) for one, p, own in each))

    outputs = run(ask())
    for one, other in zip(expected, outputs, strict=True):
        assert_same_readings(one, other, 0.0)
        assert [each.token_ids for each in one.outputs] == [each.token_ids for each in other.outputs]
        assert one.prompt_logprobs == other.prompt_logprobs
    after = num_finished(engine, "length")
    assert all(new - old > 5 for new, old in zip(after, before, strict=True))
    run(assert_empty(engine))


def test_forms_hold_and_are_read_on_both(folder, engine):
    pytest.importorskip("llguidance")
    own, run = engine
    schema = {"properties": {"a": {"enum": ["the", "stop"]}}, "required": ["a"], "additionalProperties": False}
    form = {"json": {"type": "object", **schema}, "disable_any_whitespace": True}
    params = SamplingParams(
        temperature=1, seed=2, max_tokens=40, structured_outputs=form, field_readings=True, grammar_readings=True
    )
    prompts = [f"prompt {index}" for index in range(8)]
    expected = make_tiny_llm(folder).generate(prompts, params, use_tqdm=False)

    async def all_of() -> list[RequestOutput]:
        return await asyncio.gather(*(last_of(own, prompt, params, f"form-{prompt}") for prompt in prompts))

    for found, wanted in zip(run(all_of()), expected, strict=True):
        (one,), (other,) = found.outputs, wanted.outputs
        assert (one.text, one.finish_reason) == (other.text, "stop")
        assert one.allowed_mass == pytest.approx(other.allowed_mass, abs=1e-5)
        mine, theirs = one.field_readings["$.a"], other.field_readings["$.a"]
        assert (mine.texts, mine.chosen) == (theirs.texts, theirs.chosen)
        assert mine.logprobs.tolist() == pytest.approx(theirs.logprobs.tolist(), abs=1e-4)
    run(assert_empty(own))


def test_requests_follow_their_prefix(engine):
    engine, run = engine

    async def ask():
        assert await engine.reset_prefix_cache()
        params = SamplingParams(max_tokens=1)
        for repeat in range(3):
            for name in range(6):
                output = await last_of(engine, [10 + name] * 40, params, f"{name}.{repeat}")
                # At most the prompt's last block is computed again.
                assert output.num_cached_tokens == (32 if repeat else 0)
        hits = [replica.stats["num_prefix_hit_tokens"] for replica in engine.replicas]
        assert hits[0] > 0 and hits[1] > 0
        assert await engine.reset_prefix_cache()
        assert (await last_of(engine, [10] * 40, params, "again")).num_cached_tokens == 0

    run(ask())


def test_aborts_reach_both_and_ids_are_one_space(engine):
    engine, run = engine

    async def ask():
        before = num_finished(engine, "abort")
        streams = [await engine.add_request(f"r{i}", [5 + i] * 20, LONG) for i in range(6)]
        streams.append(
            await engine.add_request("many", [50] * 20, SamplingParams(max_tokens=100, n=3, ignore_eos=True))
        )
        assert [len(replica.streams) > 1 for replica in engine.replicas] == [True, True]
        for i in range(6):
            with pytest.raises(VLLMValidationError, match="in use"):
                await engine.add_request(f"r{i}", "a", LONG)
        assert engine.num_unfinished_sequences == 9
        await engine.abort([*(f"r{i}" for i in range(6)), "many", "nobody"])
        for stream in streams:
            *_, last = [output async for output in stream]
            assert last.finished and {each.finish_reason for each in last.outputs} == {"abort"}
        assert sum(num_finished(engine, "abort")) - sum(before) == 9
        await assert_empty(engine)

    run(ask())


def test_calls_reach_both(engine):
    engine, run = engine
    assert run(engine.collective_rpc("determine_num_blocks")) == [
        replica.core.num_blocks for replica in engine.replicas
    ]
    assert len(set(engine.core_pids)) == 2


def test_a_dead_replica_takes_no_other_with_it(folder, tmp_path, monkeypatch):
    """Its requests fail at once, those of the other one are answered, and nothing further is taken."""
    (tmp_path / "threads_processor.py").write_text(
        "import pathlib, torch\n"
        "from vllm.v1.sample.logits_processor import LogitsProcessor\n"
        "class Threads(LogitsProcessor):\n"
        "    def __init__(self, config, device, is_pin_memory):\n"
        f"        path = pathlib.Path({str(tmp_path)!r}, str(config.parallel_config.data_parallel_rank))\n"
        "        path.write_text(str(torch.get_num_threads()))\n"
        "    def is_argmax_invariant(self): return True\n"
        "    def update_state(self, batch_update): pass\n"
        "    def apply(self, logits): return logits\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)

    async def ask(engine):
        streams = [await engine.add_request(f"r{i}", [5 + i] * 20, LONG) for i in range(8)]
        lost = list(engine.replicas[1].streams)
        os.kill(engine.core_pids[1], signal.SIGKILL)
        error = await asyncio.wait_for(engine.wait_dead(), 10)
        assert "engine core 1's process ended with signal 9" in str(error)
        assert engine.errored and not engine.replicas[0].is_dead and not engine.replicas[1].streams
        for check in engine.check_health(), engine.add_request("late", "a", LONG), engine.reset_prefix_cache():
            with pytest.raises(EngineDeadError, match="engine core 1"):
                await check
        await engine.abort(["r0", "r1"])
        for stream in streams:
            if stream.request_id in lost:
                with pytest.raises(EngineDeadError):
                    _ = [output async for output in stream]
            elif stream.request_id not in ("r0", "r1"):
                *_, last = [output async for output in stream]
                assert last.finished and len(last.outputs[0].token_ids) == 100
        assert 2 <= len(lost) <= 6
        assert engine._router.loads == [0, 0] and engine.num_unfinished_requests == 0

    with running(folder, logits_processors=["threads_processor:Threads"]) as engine:
        asyncio.run(ask(engine))
    # The processor says in how many threads its replica computes: together no more than there are cores.
    threads = [int((tmp_path / rank).read_text()) for rank in "01"]
    assert threads[0] == threads[1] and 1 <= threads[0] <= usable_cores() // 2


@pytest.mark.parametrize("size", [0, -1, True, 1.5, 10**6])
def test_sizes_that_cannot_be(size):
    with pytest.raises(ValueError, match="data_parallel_size must be"):
        EngineArgs(data_parallel_size=size).create_parallel_config()


def test_offline_engines_are_single(folder):
    with pytest.raises(ValueError, match=r"data_parallel_size must be 1 .* got 2; .*vllm serve --data-parallel-size"):
        LLM(str(folder), data_parallel_size=2)


def test_devices_are_given_in_turn():
    configs = [ParallelConfig(2, data_parallel_size=3, data_parallel_rank=rank) for rank in range(3)]
    assert [config.first_device for config in configs] == [0, 2, 4]


def test_there_must_be_devices_enough(folder, monkeypatch):
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: (9, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: "a GPU")
    monkeypatch.setattr(torch.cuda, "get_arch_list", lambda: ["sm_90"])
    with pytest.raises(ValueError, match=r"data_parallel_size=2 .* needs 2 CUDA devices, and there are 1"):
        EngineArgs(str(folder), data_parallel_size=2).create_engine_config()
