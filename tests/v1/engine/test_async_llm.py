"""AsyncLLM: the core in a process of its own gives what the core in this process gives, and dies cleanly."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import subprocess
import sys
import time
from contextlib import aclosing, contextmanager
from pathlib import Path

import numpy as np
import pytest
from byte_tokenizer import VOCAB_SIZE, byte_ids
from models_util import random_prompts
from preloaded import FORKED
from readings_reference import assert_same_readings
from tiny_llm import make_tiny_llm

from vllm import AsyncEngineArgs, AsyncLLM, AsyncLLMEngine, SamplingParams
from vllm.exceptions import EngineDeadError, VLLMValidationError
from vllm.outputs import RequestOutput
from vllm.sampling_params import RequestOutputKind
from vllm.v1.engine.replica import RequestStream

ROOT = Path(__file__).parents[3]


def make_args(folder: Path, **fields) -> AsyncEngineArgs:
    return AsyncEngineArgs(
        model=str(folder), **{"dtype": "float32", "max_model_len": 128, "max_logprobs": -1, **fields}
    )


@contextmanager
def running(folder: Path, **fields):
    engine = AsyncLLM.from_engine_args(make_args(folder, **fields))
    try:
        yield engine
    finally:
        engine.shutdown()


async def last_of(engine: AsyncLLM, prompt, params: SamplingParams, request_id: str):
    output = None
    async for each in engine.generate(prompt, params, request_id):
        output = each
    return output


async def is_empty(engine: AsyncLLM) -> bool:
    """Nothing is left on either side."""
    unfinished = await engine.replicas[0].core.call("has_unfinished_requests")
    streams = any(replica.streams for replica in engine.replicas)
    return not unfinished and not streams and engine.num_unfinished_requests == 0


def mixed_params(count: int) -> list[SamplingParams]:
    kinds = [
        {"temperature": 0, "logprob_token_ids": [5, 9, 11], "logprobs": 2},
        {"seed": 1, "logprobs": 3, "prompt_logprobs": 1, "logprob_entropy": True},
        {"seed": 2, "n": 3, "logprobs": 0},
        {"max_tokens": 0, "prompt_logprob_token_ids": [7, 8], "logprob_token_ids": [4]},
        {"seed": 3, "best_of": 3, "bad_words": ["th"], "logit_bias": {9: 2.0}},
        {"temperature": 0, "stop": ["e"], "logprobs": -1},
    ]
    return [SamplingParams(**{"max_tokens": 6, "ignore_eos": True, **kinds[i % len(kinds)]}) for i in range(count)]


def output_of(request_id: str, finished: bool = False) -> RequestOutput:
    return RequestOutput(request_id, None, [1], finished=finished)


# The last loop leaves tasks behind.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_one_event_loop_after_another(folder):
    """As programs that call asyncio.run for each batch."""
    params = SamplingParams(temperature=0, max_tokens=3)
    with running(folder, disable_log_stats=True, enable_log_requests=True) as engine:
        assert not engine.log_stats and engine.log_requests  # which callers read
        results = []
        for index in range(3):
            coroutine = asyncio.wait_for(last_of(engine, "a", params, f"{index}"), 60)
            results.append(asyncio.run(coroutine).outputs[0].token_ids)
        assert results[0] and results == [results[0]] * 3

        # A loop that is closed before its tasks have ended.
        loop = asyncio.new_event_loop()
        assert loop.run_until_complete(last_of(engine, "a", params, "x")).outputs[0].token_ids == results[0]
        loop.close()
        assert asyncio.run(last_of(engine, "a", params, "y")).outputs[0].token_ids == results[0]


def test_streams_that_share_an_event():
    async def run():
        changed = asyncio.Event()
        deltas, newest = RequestStream("a", True, changed), RequestStream("b", False, changed)
        assert deltas.take() == newest.take() == []
        outputs = [output_of("a"), output_of("a"), output_of("b"), output_of("b", finished=True)]
        for stream, output in zip((deltas, deltas, newest, newest), outputs, strict=True):
            stream.put(output)
        assert changed.is_set()
        assert (deltas.take(), newest.take()) == (outputs[:2], outputs[3:])
        changed.clear()
        deltas.put(outputs[0])
        deltas.end(EngineDeadError("gone"))
        # Outputs that had come before the end are not lost.
        assert changed.is_set() and deltas.take() == outputs[:1]
        with pytest.raises(EngineDeadError, match="gone"):
            deltas.take()
        newest.end()
        assert newest.is_ended and newest.take() == []

    asyncio.run(run())


def test_everything_equals_the_offline_engine(folder):
    prompts = random_prompts(VOCAB_SIZE, tuple(random.Random(0).choices(range(1, 60), k=36)), seed=3)
    params = mixed_params(36)
    expected = make_tiny_llm(folder).generate(prompts, params, use_tqdm=False)

    async def run(engine):
        requests = [last_of(engine, p, own, f"r{i}") for i, (p, own) in enumerate(zip(prompts, params, strict=True))]
        outputs = await asyncio.gather(*requests)
        assert await is_empty(engine)
        assert engine.replicas[0].stats["num_running"] == 0
        return outputs

    with running(folder) as engine:
        outputs = asyncio.run(run(engine))
    for one, other in zip(expected, outputs, strict=True):
        assert_same_readings(one, other, 0.0)
        assert [each.token_ids for each in one.outputs] == [each.token_ids for each in other.outputs]
        assert [each.text for each in one.outputs] == [each.text for each in other.outputs]
        assert [each.cumulative_logprob for each in one.outputs] == [each.cumulative_logprob for each in other.outputs]
        assert one.prompt_logprobs == other.prompt_logprobs
        if one.prompt_logprobs is not None:
            np.testing.assert_array_equal(one.prompt_logprobs.entropy, other.prompt_logprobs.entropy)


def test_streams_add_up_and_leaving_one_aborts_its_request(folder):
    async def run(engine):
        params = dict(temperature=0, max_tokens=20, ignore_eos=True, logprobs=1)
        whole = await last_of(engine, "the cat", SamplingParams(**params), "whole")
        deltas = SamplingParams(output_kind=RequestOutputKind.DELTA, **params)
        pieces = [output.outputs[0] async for output in engine.generate("the cat", deltas, "deltas")]
        assert len(pieces) > 1
        assert [token for piece in pieces for token in piece.token_ids] == whole.outputs[0].token_ids
        assert "".join(piece.text for piece in pieces) == whole.outputs[0].text
        assert sum(len(piece.logprobs) for piece in pieces) == 20
        async with aclosing(engine.generate("the cat", SamplingParams(max_tokens=100, ignore_eos=True), "left")) as run:
            async for _ in run:
                break
        task = asyncio.create_task(last_of(engine, "a", SamplingParams(max_tokens=100, ignore_eos=True), "cancelled"))
        # It has begun; 100 tokens take thousands of times longer.
        for _ in range(5):
            await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        stream = await engine.add_request("aborted", "a", SamplingParams(max_tokens=100, ignore_eos=True, n=2))
        await engine.abort(["aborted", "nobody"])
        (output,) = [output async for output in stream]
        assert output.finished and [each.finish_reason for each in output.outputs] == ["abort"] * 2
        stream = await engine.add_request("dropped", "a", SamplingParams(max_tokens=100, ignore_eos=True))
        await engine.abort("dropped", with_output=False)
        assert [output async for output in stream] == []
        assert await is_empty(engine)
        assert await engine.reset_prefix_cache()

    with running(folder) as engine:
        asyncio.run(run(engine))


def test_a_bad_request_harms_nobody(folder):
    async def run(engine):
        bad = [
            ([5] * 128, SamplingParams(), "b1"),
            ([VOCAB_SIZE], SamplingParams(), "b2"),
            ("a", SamplingParams(logprob_token_ids=[VOCAB_SIZE]), "b3"),
            ("a", SamplingParams(logits_processors=[lambda logits: logits]), "b4"),
            ("a", SamplingParams(use_beam_search=True, temperature=0, best_of=2), "b5"),
            ("a", "params", "b6"),
            ("a", SamplingParams(), ""),
            (5, SamplingParams(), "b7"),
            ([5] * 60, SamplingParams(max_tokens=60), "fits no cache"),
        ]
        good = asyncio.create_task(last_of(engine, "a", SamplingParams(max_tokens=20, ignore_eos=True), "good"))
        for prompt, params, request_id in bad[:-1]:
            with pytest.raises(VLLMValidationError):
                await last_of(engine, prompt, params, request_id)
        # An error that only the core can find comes back as the request's.
        output = await last_of(engine, *bad[-1])
        assert output.outputs[0].finish_reason == "error" and "tokens of KV cache" in output.outputs[0].error
        stream = await engine.add_request("twice", "a", SamplingParams(max_tokens=30, ignore_eos=True))
        with pytest.raises(VLLMValidationError, match="in use"):
            await engine.add_request("twice", "a", SamplingParams())
        assert [output.finished async for output in stream][-1]
        assert len((await good).outputs[0].token_ids) == 20
        with pytest.raises(RuntimeError, match="AttributeError"):
            await engine.collective_rpc("no_such_method")
        assert await is_empty(engine)

    with running(folder, num_gpu_blocks_override=6) as engine:
        asyncio.run(run(engine))


def test_an_id_that_is_used_again_gets_nothing_of_the_aborted_request(folder):
    async def run(engine):
        long, short = SamplingParams(max_tokens=100, ignore_eos=True), SamplingParams(max_tokens=2, temperature=0)
        expected = (await last_of(engine, "b", short, "alone")).outputs[0].token_ids
        for count in range(10):
            stream = await engine.add_request("again", "a" * (count + 1), long)
            await anext(stream)
            # The core computes while this loop does not read: its outputs are under way.
            time.sleep(0.02)
            await engine.abort("again")
            assert (await last_of(engine, "b", short, "again")).outputs[0].token_ids == expected
        assert await is_empty(engine)

    with running(folder) as engine:
        asyncio.run(run(engine))


def test_a_killed_core_ends_every_stream_with_one_clear_error(folder):
    async def run(engine):
        # While it lives, every step is heard of, whatever came of it: a long prompt is no hang.
        core = engine.replicas[0].core
        num_messages = core.num_messages
        (_,) = [output async for output in engine.generate([5] * 100, SamplingParams(max_tokens=1), "long")]
        assert core.num_messages - num_messages >= 100 // 16 + 1
        requests = [
            last_of(engine, byte_ids("abc"), SamplingParams(max_tokens=120, ignore_eos=True), f"r{i}") for i in range(5)
        ]
        tasks = [asyncio.create_task(request) for request in requests]
        await asyncio.sleep(0.1)
        os.kill(engine.core_pids[0], signal.SIGKILL)
        began = time.monotonic()
        results = await asyncio.wait_for(asyncio.gather(*tasks, return_exceptions=True), 10)
        assert time.monotonic() - began < 10
        for result in results:
            # One that was done before the signal has its answer.
            assert isinstance(result, EngineDeadError) or result.finished
        assert isinstance(results[-1], EngineDeadError) and "signal 9" in str(results[-1])
        assert engine.errored
        with pytest.raises(EngineDeadError):
            await engine.check_health()
        with pytest.raises(EngineDeadError):
            await last_of(engine, "a", SamplingParams(), "late")
        assert engine.num_unfinished_requests == 0

    with running(folder, max_num_seqs=1, max_num_batched_tokens=16) as engine:
        asyncio.run(run(engine))


def test_the_cause_of_a_death_is_told(folder, tmp_path, monkeypatch):
    (tmp_path / "fatal_processor.py").write_text(
        "from vllm.v1.sample.logits_processor import LogitsProcessor\n"
        "class Fatal(LogitsProcessor):\n"
        "    def __init__(self, config, device, is_pin_memory): pass\n"
        "    def is_argmax_invariant(self): return False\n"
        "    def update_state(self, batch_update): pass\n"
        "    def apply(self, logits): raise SystemExit('the processor gave up')\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))

    async def run(engine):
        await engine.check_health()
        with pytest.raises(EngineDeadError, match=r"exit status 1: SystemExit: the processor gave up"):
            await last_of(engine, "a", SamplingParams(), "r")

    with running(folder, logits_processors=["fatal_processor:Fatal"]) as engine:
        asyncio.run(run(engine))


def test_a_core_that_cannot_start_says_why(folder, monkeypatch):
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "0.00001")
    with pytest.raises(EngineDeadError, match=r"KV cache budget .* max_model_len=128"):
        AsyncLLM.from_engine_args(make_args(folder))


def test_a_limit_that_is_none_is_refused_before_a_core_starts(folder, monkeypatch):
    monkeypatch.setenv("VLLM_ENGINE_HANG_TIMEOUT_S", "-5")
    with pytest.raises(ValueError, match="VLLM_ENGINE_HANG_TIMEOUT_S must be .*, got '-5'"):
        AsyncLLM.from_engine_args(make_args(folder))


def test_the_core_ends_with_its_parent(folder, tmp_path):
    """No guard of the main module is needed, and nothing outlives a parent that is killed."""
    code = (
        "import os, sys, signal\n"
        "from vllm import AsyncEngineArgs, AsyncLLM\n"
        "args = AsyncEngineArgs(model=sys.argv[1], max_model_len=64)\n"
        "print(AsyncLLM.from_engine_args(args).core_pids[0], flush=True)\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "TMPDIR": str(tmp_path)}
    ran = subprocess.run(
        [sys.executable, "-c", FORKED + code, str(folder)],
        stdout=subprocess.PIPE,
        text=True,
        env=environment,
        timeout=60,
    )
    assert ran.returncode == -signal.SIGKILL
    core_pid = int(ran.stdout)
    deadline = time.monotonic() + 10
    while _is_alive(core_pid):
        assert time.monotonic() < deadline, "the core outlived its parent"
        time.sleep(0.05)
    assert list(tmp_path.iterdir()) == []


def test_shutdown_leaves_no_process_and_ends_streams(folder):
    async def run(engine):
        stream = await engine.add_request("r", "a", SamplingParams(max_tokens=100, ignore_eos=True))
        (pid,) = engine.core_pids
        engine.shutdown()
        with pytest.raises(EngineDeadError, match="shut down"):
            async for _ in stream:
                pass
        assert not _is_alive(pid)
        engine.shutdown()

    with running(folder) as engine:
        asyncio.run(run(engine))


def test_the_older_names():
    assert AsyncLLMEngine is AsyncLLM


def _is_alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"
