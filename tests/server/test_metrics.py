"""GET /metrics of a server whose engine works: exact counts, no waiting, one server's numbers in its own answer."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Callable
from contextlib import aclosing, contextmanager
from pathlib import Path

import httpx
import pytest
from asgi import client_of, make_engine
from byte_tokenizer import VOCAB_SIZE
from models_util import random_prompts
from prometheus_client.parser import text_string_to_metric_families
from tiny_llm import make_tiny_model

from vllm import AsyncLLM, SamplingParams
from vllm.exceptions import EngineDeadError

GATED_PROCESSOR = """
import os, time
from vllm.v1.sample.logits_processor import LogitsProcessor

class Gated(LogitsProcessor):
    def __init__(self, config, device, is_pin_memory): pass
    def is_argmax_invariant(self): return False
    def update_state(self, batch_update): pass
    def apply(self, logits):
        open({begun!r}, "w").close()
        while not os.path.exists({gate!r}):
            time.sleep(0.01)
        return logits
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_tiny_model(tmp_path_factory.mktemp("tiny"), max_position_embeddings=1024)


@contextmanager
def running(folder: Path, **fields):
    engine = make_engine(folder, **fields)
    try:
        yield engine
    finally:
        engine.shutdown()


class Scrape:
    """One answer of /metrics."""

    def __init__(self, answer: httpx.Response) -> None:
        assert answer.status_code == 200
        assert answer.headers["Content-Type"] == "text/plain; version=0.0.4; charset=utf-8"
        self.values = {
            (sample.name, *sorted(sample.labels.items())): sample.value
            for family in text_string_to_metric_families(answer.text)
            for sample in family.samples
        }

    def __call__(self, name: str, **labels: str) -> float:
        return self.values[(f"vllm:{name}", *sorted({"model_name": "tiny", "engine": "0", **labels}.items()))]

    def finished(self) -> dict[str, float]:
        reasons = ("stop", "length", "abort", "error")
        return {reason: self("request_success_total", finished_reason=reason) for reason in reasons}


async def scrape(client: httpx.AsyncClient) -> Scrape:
    return Scrape(await asyncio.wait_for(client.get("/metrics"), 10))


async def scrape_until(client: httpx.AsyncClient, condition: Callable[[Scrape], bool]) -> Scrape:
    """The first answer that fulfils the condition."""
    deadline = time.monotonic() + 20
    while not condition(answer := await scrape(client)):
        assert time.monotonic() < deadline, answer.values
        await asyncio.sleep(0.02)
    return answer


async def last_of(engine: AsyncLLM, prompt, params: SamplingParams, request_id: str):
    output = None
    async for each in engine.generate(prompt, params, request_id):
        output = each
    return output


def params_of(index: int) -> SamplingParams:
    kinds = [
        {"temperature": 0, "max_tokens": 5, "logprob_token_ids": [5, 9, 11]},
        {"temperature": 0, "max_tokens": 7, "logprobs": 2},
        {"max_tokens": 0, "logprob_token_ids": [4, 5], "prompt_logprob_token_ids": [6, 7, 8, 9]},
        {"temperature": 0, "max_tokens": 3},
        {"temperature": 1, "seed": 1, "max_tokens": 4, "logprob_token_ids": list(range(40))},
    ]
    return SamplingParams(ignore_eos=True, **kinds[index % len(kinds)])


def ids_of(params: SamplingParams, num_prompt_tokens: int) -> tuple[int, int]:
    """Rows and ids that a request reads by its parameters."""
    rows = max(params.max_tokens, 1) if params.num_logprobs is not None else 0
    prompt_rows = num_prompt_tokens - 1 if params.reads_prompt else 0
    ids = rows * len(params.logprob_token_ids or ()) + prompt_rows * len(params.prompt_logprob_token_ids or ())
    return rows + prompt_rows, ids


async def check_exact_counts(engine: AsyncLLM, client: httpx.AsyncClient) -> None:
    # Every prompt twice, one after the other, so that the second finds the first one's blocks.
    prompts = random_prompts(VOCAB_SIZE, (40, 17, 33, 20, 64), seed=3) * 2
    params = [params_of(index) for index in range(len(prompts))]
    began, outputs = time.monotonic(), []
    for half in (range(5), range(5, 10)):
        outputs += await asyncio.gather(*(last_of(engine, prompts[i], params[i], f"r{i}") for i in half))
    wall = time.monotonic() - began
    seen = await scrape(client)
    num_prompt, num_generated = sum(map(len, prompts)), sum(own.max_tokens for own in params)
    assert seen("prompt_tokens_total") == seen("prefix_cache_queries_total") == num_prompt
    assert seen("generation_tokens_total") == num_generated
    num_cached = sum(output.num_cached_tokens for output in outputs)
    assert num_cached > 0
    assert seen("prefix_cache_hits_total") == seen("prompt_tokens_cached_total") == num_cached
    assert seen.finished() == {"stop": 0, "length": 10, "abort": 0, "error": 0}
    rows, ids = zip(*map(ids_of, params, map(len, prompts)), strict=True)
    assert (seen("logprob_rows_read_total"), seen("logprob_token_ids_read_total")) == (sum(rows), sum(ids))
    assert 0 < seen("readings_seconds_total") < wall
    assert seen("request_prompt_tokens_sum") == num_prompt
    assert seen("request_generation_tokens_sum") == seen("request_params_max_tokens_sum") == num_generated
    assert seen("request_params_n_sum") == 10
    assert seen("iteration_tokens_total_sum") == num_prompt - num_cached + num_generated
    check_times(seen, outputs, wall)


def check_times(seen: Scrape, outputs, wall: float) -> None:
    for name in ("time_to_first_token", "e2e_request_latency", "request_queue_time", "request_prefill_time"):
        assert seen(f"{name}_seconds_count") == 10
        assert 0 < seen(f"{name}_seconds_sum") < 10 * wall
    num_gaps = sum(max(len(output.outputs[0].token_ids) - 1, 0) for output in outputs)
    assert seen("inter_token_latency_seconds_count") == num_gaps
    # The same steps, seen as gaps and as whole sequences.
    assert seen("inter_token_latency_seconds_sum") == pytest.approx(seen("request_decode_time_seconds_sum"))
    whole = seen("request_prefill_time_seconds_sum") + seen("request_decode_time_seconds_sum")
    assert seen("request_inference_time_seconds_sum") == pytest.approx(whole)
    first_tokens = sum(output.metrics.first_token_time - output.metrics.arrival_time for output in outputs)
    assert seen("time_to_first_token_seconds_sum") == pytest.approx(first_tokens)
    queued = sum(output.metrics.first_scheduled_time - output.metrics.arrival_time for output in outputs)
    assert seen("request_queue_time_seconds_sum") == pytest.approx(queued)
    assert whole + queued < seen("e2e_request_latency_seconds_sum")


async def check_other_endings(engine: AsyncLLM, client: httpx.AsyncClient) -> None:
    before = await scrape(client)
    await last_of(engine, "the cat", SamplingParams(max_tokens=50, seed=1, n=2, ignore_eos=True, stop=["e", "a"]), "s")
    refused = await last_of(engine, [5] * 90, SamplingParams(max_tokens=600), "fits no cache")
    assert refused.outputs[0].finish_reason == "error" and refused.metrics.first_scheduled_time is None
    long = SamplingParams(max_tokens=600, ignore_eos=True, seed=1)
    async with aclosing(engine.generate("left", long, "left")) as outputs:
        async for _ in outputs:
            break
    for index in range(3):
        await engine.add_request(f"aborted{index}", "a", SamplingParams(max_tokens=600, ignore_eos=True, seed=1, n=2))
    await scrape_until(client, lambda seen: seen("num_requests_running") > 0)
    await engine.abort([f"aborted{index}" for index in range(3)])
    seen = await scrape_until(client, lambda seen: seen("num_requests_running") == 0)
    assert seen("num_requests_waiting") == seen("kv_cache_usage_perc") == 0
    gained = {reason: count - before.finished()[reason] for reason, count in seen.finished().items()}
    assert gained["abort"] == 1 + 6 and gained["error"] == 1
    assert gained["stop"] + gained["length"] == 2
    for key, count in before.values.items():
        if key[0].endswith(("_total", "_count", "_sum", "_bucket")):
            assert seen.values[key] >= count, key


async def check_http_requests(client: httpx.AsyncClient) -> None:
    before = await scrape(client)
    body = {"model": "tiny", "prompt": ["the cat", "a dog"], "max_tokens": 6, "seed": 1, "n": 2, "ignore_eos": True}
    answer = await client.post("/v1/completions", json={**body, "logprob_token_ids": [4, 5, 6]})
    usage = answer.json()["usage"]
    seen = await scrape(client)
    assert seen("generation_tokens_total") - before("generation_tokens_total") == usage["completion_tokens"] == 24
    # Each of a prompt's two sequences has a prompt to run, if only to find it in the cache.
    assert seen("prompt_tokens_total") - before("prompt_tokens_total") == 2 * usage["prompt_tokens"]
    assert seen("logprob_token_ids_read_total") - before("logprob_token_ids_read_total") == 24 * 3
    assert seen("request_params_n_count") - before("request_params_n_count") == 2
    assert seen("request_params_n_sum") - before("request_params_n_sum") == 4


def test_counts(folder):
    async def run(engine):
        async with client_of(engine) as client:
            await check_exact_counts(engine, client)
            await check_http_requests(client)
            await check_other_endings(engine, client)

    with running(folder, max_model_len=1024, num_gpu_blocks_override=40) as engine:
        asyncio.run(run(engine))


async def check_a_long_prompt_is_seen(engine: AsyncLLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps of a prompt that give nothing yet tell that they were."""
    told = []
    (replica,) = engine.replicas
    process = replica.output_processor.process_outputs

    def spy(outputs, step_time):
        told.append((len(outputs), replica.stats["num_running"]))
        return process(outputs, step_time)

    monkeypatch.setattr(replica.output_processor, "process_outputs", spy)
    await last_of(engine, [5] * 40, SamplingParams(max_tokens=1), "long")
    assert told == [(0, 1), (0, 1), (1, 0)]


def test_a_scrape_waits_for_nobody(folder, tmp_path, monkeypatch):
    """While a step runs, and when the engine is dead."""
    begun, gate = tmp_path / "begun", tmp_path / "gate"
    (tmp_path / "gated_processor.py").write_text(GATED_PROCESSOR.format(begun=str(begun), gate=str(gate)))
    monkeypatch.syspath_prepend(str(tmp_path))

    async def run(engine, other):
        async with client_of(engine) as client, client_of(other, served_model_name=["other"]) as other_client:
            tasks = [asyncio.create_task(last_of(engine, "abc", SamplingParams(max_tokens=3), f"r{i}")) for i in (0, 1)]
            while not begun.exists():
                await asyncio.sleep(0.01)
            seen = await scrape(client)
            assert seen("num_requests_running") + seen("num_requests_waiting") == 2
            assert seen.finished()["length"] == 0
            gate.touch()
            await asyncio.gather(*tasks)
            seen = await scrape(client)
            assert seen("num_requests_running") == seen("num_requests_waiting") == 0
            assert sum(seen.finished().values()) == 2 and seen("prompt_tokens_total") == 6
            # The other server of this process has its own numbers, under its own name.
            others = (await scrape(other_client)).values
            assert not any(("model_name", "tiny") in key for key in others)
            assert others[("vllm:prompt_tokens_total", ("engine", "0"), ("model_name", "other"))] == 0
            await check_a_long_prompt_is_seen(other, monkeypatch)
            gate.unlink()
            stuck = asyncio.create_task(last_of(engine, "abc", SamplingParams(max_tokens=3), "stuck"))
            begun.unlink()
            while not begun.exists():
                await asyncio.sleep(0.01)
            os.kill(engine.core_pids[0], signal.SIGKILL)
            with pytest.raises(EngineDeadError):
                await stuck
            seen = await scrape(client)
            assert seen.finished()["error"] == 1 and seen("prompt_tokens_total") == 6
            assert seen("num_requests_running") == seen("num_requests_waiting") == seen("kv_cache_usage_perc") == 0

    gated, small_steps = {"logits_processors": ["gated_processor:Gated"]}, {"max_num_batched_tokens": 16}
    with running(folder, **gated) as engine, running(folder, **small_steps) as other:
        asyncio.run(run(engine, other))
