"""Pauses and sleep of AsyncLLM: what becomes of requests that are there, and of those that come."""

from __future__ import annotations

import asyncio
import os
import signal

import pytest
from tiny_llm import make_tiny_model

from vllm import AsyncEngineArgs, AsyncLLM, SamplingParams
from vllm.exceptions import EngineDeadError, VLLMValidationError

PARAMS = SamplingParams(max_tokens=90, temperature=0, ignore_eos=True)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return str(make_tiny_model(tmp_path_factory.mktemp("tiny")))


def run_with_engine(folder, test):
    """Run `test(engine, wanted)`; `wanted` is what a request gives that nothing disturbs."""

    async def main():
        engine = AsyncLLM.from_engine_args(AsyncEngineArgs(model=folder, dtype="float32", max_model_len=128))
        try:
            await test(engine, await generate(engine, "undisturbed"))
        finally:
            engine.shutdown()

    asyncio.run(asyncio.wait_for(main(), 120))


async def generate(engine, request_id, begun=None):
    tokens = []
    async for output in engine.generate("abc", PARAMS, request_id, lora_request=None, tokenization_kwargs={}):
        tokens = output.outputs[0].token_ids
        if begun is not None:
            begun.set()
    return tokens


async def begin(engine, request_id):
    begun = asyncio.Event()
    task = asyncio.create_task(generate(engine, request_id, begun))
    await begun.wait()
    return task


async def is_held(*tasks):
    await asyncio.sleep(0.3)
    return not any(task.done() for task in tasks)


@pytest.mark.parametrize("clear_cache", [True, False])
def test_kept_requests_go_on(folder, clear_cache):
    async def test(engine, wanted):
        running = await begin(engine, "a")
        await engine.pause_generation(mode="keep", clear_cache=clear_cache)
        coming = asyncio.create_task(generate(engine, "b"))
        assert await engine.is_paused()
        assert await is_held(running, coming)
        await engine.resume_generation()
        assert not await engine.is_paused()
        assert await running == await coming == wanted

    run_with_engine(folder, test)


def test_aborted_and_awaited_requests(folder):
    async def test(engine, wanted):
        running = await begin(engine, "a")
        await engine.pause_generation()
        assert len(await running) < len(wanted)
        await engine.resume_generation()
        running = await begin(engine, "b")
        await engine.pause_generation(mode="wait")
        assert running.done() or await running == wanted
        assert engine.num_unfinished_requests == 0
        await engine.resume_generation()
        with pytest.raises(VLLMValidationError, match="mode must be one of"):
            await engine.pause_generation(mode="now")

    run_with_engine(folder, test)


@pytest.mark.parametrize("level", [1, 2])
def test_sleep(folder, level):
    async def test(engine, wanted):
        running = await begin(engine, "a")
        await engine.sleep(level, mode="keep")
        coming = asyncio.create_task(generate(engine, "b"))
        assert await engine.is_sleeping()
        assert await is_held(running, coming)
        assert not await engine.wake_up(["weights"])
        assert await is_held(running, coming)
        assert await engine.wake_up(["kv_cache"])
        assert await running == await coming == wanted
        await engine.check_health()

    run_with_engine(folder, test)


def test_bad_arguments_pause_nothing(folder):
    async def test(engine, wanted):
        for call in (engine.sleep(3), engine.sleep(1, mode="now"), engine.wake_up(["everything"])):
            with pytest.raises(VLLMValidationError):
                await call
        assert not await engine.is_paused()
        assert await generate(engine, "a") == wanted

    run_with_engine(folder, test)


def test_who_waits_hears_of_a_dead_engine(folder):
    async def test(engine, wanted):
        await engine.pause_generation()
        coming = asyncio.create_task(generate(engine, "a"))
        assert await is_held(coming)
        os.kill(engine.core_pids[0], signal.SIGKILL)
        with pytest.raises(EngineDeadError):
            await coming

    run_with_engine(folder, test)


def test_small_questions(folder):
    async def test(engine, wanted):
        assert (await engine.get_tokenizer()).decode(wanted) is not None
        assert (await engine.get_vllm_config()).model_config is await engine.get_model_config() is engine.model_config
        assert not await engine.is_tracing_enabled()
        await engine.do_log_stats()
        await engine.abort("unknown", internal=True)
        with pytest.raises(VLLMValidationError, match="add_lora"):
            await engine.add_lora(None)
        with pytest.raises(VLLMValidationError, match="delay_iterations"):
            await engine.start_profile("mine", delay_iterations=2)
        assert engine.is_running and not engine.is_stopped and not engine.errored
        assert await engine.reset_prefix_cache()
        assert await engine.collective_rpc("determine_num_blocks")

    run_with_engine(folder, test)
