"""Loggers of callers' own: what they are told of each step, offline and by an AsyncLLM."""

from __future__ import annotations

import asyncio
import dataclasses
import sys
from types import ModuleType, SimpleNamespace
from typing import ClassVar

import prometheus_client
import pytest
from tiny_llm import make_tiny_model

from vllm import AsyncEngineArgs, AsyncLLM, EngineArgs, LLMEngine, SamplingParams
from vllm.exceptions import VLLMValidationError
from vllm.outputs import RequestMetrics
from vllm.v1.engine import FinishReason
from vllm.v1.metrics.loggers import AggregateStatLoggerBase, LoggingStatLogger, PrometheusStatLogger, StatLoggerBase
from vllm.v1.metrics.ray_wrappers import RayPrometheusStatLogger
from vllm.v1.metrics.stats import IterationStats, SchedulerStats

PROMPT, MAX_TOKENS = "the stop" * 4, 5


class Recorder(StatLoggerBase):
    """Keeps all that it is told."""

    made: ClassVar[list[Recorder]] = []

    def __init__(self, vllm_config, engine_index=0):
        self.config, self.index = vllm_config, engine_index
        self.steps, self.calls = [], []
        Recorder.made.append(self)

    def record(self, scheduler_stats, iteration_stats, mm_cache_stats=None, engine_idx=0):
        assert engine_idx == self.index
        self.steps.append((scheduler_stats, iteration_stats))

    def log_engine_initialized(self):
        self.calls.append("initialized")

    def log(self):
        self.calls.append("log")


class Failing(AggregateStatLoggerBase):
    """Cannot be told anything."""

    def __init__(self, vllm_config, engine_indexes):
        self.engine_indexes = engine_indexes

    def record(self, scheduler_stats, iteration_stats, mm_cache_stats=None, engine_idx=0):
        raise RuntimeError("full")

    def log_engine_initialized(self):
        raise RuntimeError("not now")


@pytest.fixture(scope="module")
def arguments(tmp_path_factory):
    folder = make_tiny_model(tmp_path_factory.mktemp("tiny"))
    return {"model": str(folder), "dtype": "float32", "max_model_len": 128, "block_size": 4}


def params(**fields):
    return SamplingParams(max_tokens=MAX_TOKENS, ignore_eos=True, **fields)


def run(engine, request_id, own):
    engine.add_request(request_id, PROMPT, own)
    outputs = []
    while engine.has_unfinished_requests():
        outputs += engine.step()
    return outputs[-1]


def test_each_step_is_told(arguments, caplog):
    Recorder.made.clear()
    engine = LLMEngine.from_engine_args(EngineArgs(**arguments), stat_loggers=[Failing, Recorder])
    (recorder,) = Recorder.made
    output = run(engine, "first", params(n=2, seed=3))
    num_prompt = len(output.prompt_token_ids)
    iterations = [iteration for _, iteration in recorder.steps]
    assert sum(each.num_prompt_tokens for each in iterations) == 2 * num_prompt
    assert sum(each.num_generation_tokens for each in iterations) == 2 * MAX_TOKENS
    assert sum(len(each.time_to_first_tokens_iter) for each in iterations) == 2
    assert sum(len(each.inter_token_latencies_iter) for each in iterations) == 2 * (MAX_TOKENS - 1)
    ended = [own for each in iterations for own in each.finished_requests]
    assert [own.finish_reason for own in ended] == [FinishReason.LENGTH] * 2
    assert [(own.num_prompt_tokens, own.num_generation_tokens) for own in ended] == [(num_prompt, MAX_TOKENS)] * 2
    assert ended[0].max_tokens_param == MAX_TOKENS and ended[0].e2e_latency >= ended[0].inference_time > 0
    assert iterations[-1].n_params_iter == [2] and iterations[-1].max_num_generation_tokens_iter == [MAX_TOKENS]
    # The counts of the core are those since the step before.
    before = len(recorder.steps)
    again = run(engine, "again", params())
    later = [scheduler.prefix_cache_stats for scheduler, _ in recorder.steps[before:]]
    assert (
        sum(each.queries for each in later) == num_prompt
        and sum(each.hits for each in later) == again.num_cached_tokens > 0
    )
    assert any(scheduler.num_running_reqs == 1 for scheduler, _ in recorder.steps)
    assert any(scheduler.kv_cache_usage > 0 for scheduler, _ in recorder.steps)
    engine.do_log_stats()
    assert recorder.calls == ["initialized", "log"]
    assert recorder.config.cache_config.num_gpu_blocks == engine.engine_core.executor.num_blocks
    assert caplog.text.count("a stat logger failed") <= 1


def test_loggers_of_an_async_engine_and_what_it_cannot_use(arguments):
    Recorder.made.clear()
    args = AsyncEngineArgs(**arguments)
    with pytest.raises(VLLMValidationError, match="stat_loggers must be a list of callables"):
        AsyncLLM.from_engine_args(args, stat_loggers=["logger"])

    async def serve():
        engine = AsyncLLM.from_engine_args(args, stat_loggers=[Recorder, LoggingStatLogger])
        try:
            async for output in engine.generate(PROMPT, params(), "one"):
                last = output
            stream = engine.generate(PROMPT, SamplingParams(max_tokens=100, ignore_eos=True), "two")
            await anext(stream)
            await stream.aclose()
            async for _ in engine.generate(PROMPT, params(), "three"):
                pass
            await engine.do_log_stats()
        finally:
            engine.shutdown()
        return engine, last

    engine, last = asyncio.run(serve())
    (recorder,) = Recorder.made
    assert engine.vllm_config.cache_config.num_gpu_blocks == engine.replicas[0].core.num_blocks
    ended = [own.finish_reason for _, iteration in recorder.steps for own in iteration.finished_requests]
    assert ended == [FinishReason.LENGTH, FinishReason.ABORT, FinishReason.LENGTH]
    assert recorder.calls == ["initialized", "log"]
    told = dataclasses.asdict(last.metrics)
    assert told["num_generation_tokens"] == MAX_TOKENS and not told["is_corrupted"]
    times = [told[name] for name in ("queued_ts", "scheduled_ts", "first_token_ts", "last_token_ts")]
    assert times == sorted(times) and times[0] == told["arrival_time"] > 0
    assert told["first_token_latency"] == told["first_token_ts"] - told["arrival_time"]


def test_prometheus_own_registry_has_the_metrics_of_the_last_logger(arguments):
    config = EngineArgs(**arguments).create_engine_config()
    for _ in range(2):
        logger = PrometheusStatLogger(config, [0, 1])
    iteration = IterationStats(num_generation_tokens=3, time_to_first_tokens_iter=[0.5])
    iteration.prompt_token_stats.add(7, 4)
    logger.record(SchedulerStats(num_running_reqs=2), iteration, engine_idx=1)
    logger.log_engine_initialized()

    def value(name):
        labels = {"model_name": config.model_config.model, "engine": "1"}
        return prometheus_client.REGISTRY.get_sample_value(name, labels)

    assert value("vllm:generation_tokens_total") == 3 and value("vllm:prompt_tokens_total") == 7
    assert value("vllm:num_requests_running") == 2
    assert value("vllm:time_to_first_token_seconds_sum") == 0.5
    assert value("vllm:iteration_tokens_total_sum") == 6  # 3 computed, 3 generated


def test_rays_metrics_have_the_same_names_with_underscores(arguments, monkeypatch):
    made = {}

    class Metric:
        def __init__(self, name, description, tag_keys, boundaries=None):
            made[name] = self
            self.tag_keys, self.boundaries, self.told = tag_keys, boundaries, []

        def add(self, value, tags):
            assert set(tags) == set(self.tag_keys) and all(isinstance(own, str) for own in tags.values())
            self.told.append(value)

        inc = set = observe = add

    metrics = ModuleType("ray.util.metrics")
    metrics.Gauge = metrics.Counter = metrics.Histogram = Metric
    monkeypatch.setitem(sys.modules, "ray.util", SimpleNamespace(metrics=metrics))
    config = EngineArgs(**arguments).create_engine_config()
    logger = RayPrometheusStatLogger(config, [0])
    iteration = IterationStats(num_generation_tokens=3, time_to_first_tokens_iter=[0.5, 0.25])
    logger.record(SchedulerStats(num_waiting_reqs=4), iteration)
    logger.log_engine_initialized()
    assert made["vllm_generation_tokens"].told == [3] and made["vllm_num_requests_waiting"].told == [4]
    assert made["vllm_time_to_first_token_seconds"].told == [0.5, 0.25]
    assert made["vllm_time_to_first_token_seconds"].boundaries[0] == 0.001
    assert made["vllm_cache_config_info"].told == [1]
    with pytest.raises(ValueError, match="there are 2 labels: model_name, engine"):
        logger._metrics["vllm:generation_tokens"].labels("only one")


def test_times_of_a_request_have_no_value_before_they_are_reached():
    metrics = RequestMetrics.arrived(4.0)
    assert metrics.first_scheduled_time is metrics.first_token_time is metrics.finished_time is None
