"""Pauses and sleep of AsyncLLM: what becomes of requests that are there, and of those that come."""

from __future__ import annotations

import asyncio
import os
import signal

import pytest
from tiny_llm import make_tiny_model

from vllm import AsyncEngineArgs, AsyncLLM, PoolingParams, SamplingParams
from vllm.exceptions import EngineDeadError, VLLMValidationError

PARAMS = SamplingParams(max_tokens=90, temperature=0, ignore_eos=True)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return str(make_tiny_model(tmp_path_factory.mktemp("tiny")))


def run_with_engine(folder, test, **fields):
    """Run `test(engine, wanted)`; `wanted` is what a request gives that nothing disturbs."""

    async def main():
        args = AsyncEngineArgs(model=folder, dtype="float32", max_model_len=128, **fields)
        engine = AsyncLLM.from_engine_args(args)
        try:
            await test(engine, None if fields else await generate(engine, "undisturbed"))
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


async def last_of(stream):
    return [output.outputs[0].token_ids async for output in stream][-1]


async def add_checked(engine):
    prompts = await engine.process_prompts(["abc"], [PARAMS])
    checked = engine.input_processor.process_params(PARAMS, len(prompts[0].token_ids))
    return await last_of(await engine.add_checked("checked", prompts[0], checked))


async def add_request(engine):
    return await last_of(await engine.add_request("added", "abc", PARAMS))


async def encode(engine):
    async for output in engine.encode("abc", PoolingParams(task="embed"), "encoded"):
        return output.outputs.data.tolist()


async def decide(engine):
    return await engine.decide("abc", [{"type": "predicate", "instructions": "c"}])


# Public methods that wait while the engine sleeps.
REQUESTS = {
    "generate": lambda engine: generate(engine, "generated"),
    "add_request": add_request,
    "add_checked": add_checked,
    "decide": decide,
}
# Calls that answer meanwhile.
ANSWERING = {
    "abort": lambda engine: engine.abort("unknown"),
    "check_health": lambda engine: engine.check_health(),
    "collective_rpc": lambda engine: engine.collective_rpc("determine_num_host_blocks"),
    "do_log_stats": lambda engine: engine.do_log_stats(),
    "get_model_config": lambda engine: engine.get_model_config(),
    "get_supported_tasks": lambda engine: engine.get_supported_tasks(),
    "get_tokenizer": lambda engine: engine.get_tokenizer(),
    "get_vllm_config": lambda engine: engine.get_vllm_config(),
    "get_weight_version": lambda engine: engine.get_weight_version(),
    "init_weight_transfer_engine": lambda engine: engine.init_weight_transfer_engine(),
    "is_paused": lambda engine: engine.is_paused(),
    "is_sleeping": lambda engine: engine.is_sleeping(),
    "is_tracing_enabled": lambda engine: engine.is_tracing_enabled(),
    "pause_generation": lambda engine: engine.pause_generation(mode="keep"),
    "process_prompts": lambda engine: engine.process_prompts(["abc"], [PARAMS]),
    "reset_encoder_cache": lambda engine: engine.reset_encoder_cache(),
    "reset_mm_cache": lambda engine: engine.reset_mm_cache(),
    "reset_prefix_cache": lambda engine: engine.reset_prefix_cache(),
    "resume_generation": lambda engine: engine.resume_generation(),
    "sleep": lambda engine: engine.sleep(1, mode="keep"),
}
# They end the engine, wake it, need a profiler's folder, or are refused.
OTHERS = {
    "compile_grammar",
    "encode",
    "kill_cores",
    "shutdown",
    "start_profile",
    "stop_profile",
    "wait_dead",
    "wake_up",
}
OTHERS |= {"add_lora", "remove_lora", "list_loras", "pin_lora", "with_adapters"}  # test_adapters_async.py
# test_weight_versions.py
OTHERS |= {"start_weight_update", "update_weights", "finish_weight_update", "get_num_unfinished_requests"}
OTHERS |= {"wait_for_requests_to_drain"}


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


def test_no_method_is_forgotten():
    methods = {name for name in dir(AsyncLLM) if not name.startswith("_") and callable(getattr(AsyncLLM, name))}
    assert methods - {"from_engine_args", "from_vllm_config"} == {*REQUESTS, *ANSWERING, *OTHERS}


def test_every_method_while_it_sleeps(folder):
    async def test(engine, wanted):
        def without_id(result):
            return result if isinstance(result, list) else result.answers

        awake = {name: without_id(await request(engine)) for name, request in REQUESTS.items()}
        for tags in (None, ["weights"], ["kv_cache"]):
            await engine.sleep(1)
            if tags is not None:
                assert not await engine.wake_up(tags)
            coming = {name: asyncio.create_task(request(engine)) for name, request in REQUESTS.items()}
            for name, call in ANSWERING.items():
                if tags is None or name != "sleep":
                    await asyncio.wait_for(call(engine), 60)
            assert await engine.is_paused()  # resume_generation does not wake it
            assert await is_held(*coming.values())
            assert await engine.wake_up()
            for name, task in coming.items():
                assert without_id(await asyncio.wait_for(task, 60)) == awake[name], name

    run_with_engine(folder, test)


def test_pooled_requests_wait_while_it_sleeps(folder):
    async def test(engine, _):
        awake = await encode(engine)
        await engine.sleep(2)
        assert not await engine.wake_up(["weights"])
        coming = asyncio.create_task(encode(engine))
        assert await is_held(coming)
        assert await engine.wake_up()
        assert await asyncio.wait_for(coming, 60) == awake

    run_with_engine(folder, test, runner="pooling")


def test_an_aborted_pooled_request_ends_with_an_output(folder):
    async def test(engine, _):
        stream = await engine.add_request("pooled", "abc", PoolingParams(task="embed"))
        await engine.abort("pooled")
        (output,) = [each async for each in stream]
        assert output.finished and output.outputs.data.numel() == 0 and output.prompt_token_ids
        assert output.error.code == "aborted" and output.error.retryable

    run_with_engine(folder, test, runner="pooling")


def test_kept_requests_are_run_to_their_ends(folder):
    async def test(engine, wanted):
        running = await begin(engine, "a")
        await engine.pause_generation(mode="keep")
        assert await is_held(running)
        await asyncio.wait_for(engine.pause_generation(mode="wait"), 60)
        assert await running == wanted
        await engine.resume_generation()
        running = await begin(engine, "b")
        await engine.sleep(mode="keep")
        for call in (engine.pause_generation(mode="wait"), engine.sleep(2, mode="wait")):
            with pytest.raises(VLLMValidationError, match="until a sleeping engine wakes up"):
                await asyncio.wait_for(call, 60)
        await engine.resume_generation()
        assert await is_held(running)
        assert await engine.wake_up()
        assert await running == wanted

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
        with pytest.raises(VLLMValidationError, match="must be a LoRARequest"):
            await engine.add_lora(None)
        with pytest.raises(VLLMValidationError, match="delay_iterations"):
            await engine.start_profile("mine", delay_iterations=2)
        assert engine.is_running and not engine.is_stopped and not engine.errored
        assert await engine.reset_prefix_cache()
        assert await engine.collective_rpc("determine_num_blocks")
        assert await engine.collective_rpc(lambda worker, more: worker.rank + more, args=(3,)) == [3]

    run_with_engine(folder, test)
