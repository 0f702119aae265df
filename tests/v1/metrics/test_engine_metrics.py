"""Every count and every interval of an engine's metrics, from steps made by hand."""

from __future__ import annotations

import random

import numpy as np
import pytest
from prometheus_client import Histogram as ReferenceHistogram

from vllm import SamplingParams
from vllm.logprobs.lists import LogprobsLists, LogprobsRows
from vllm.v1.engine.input_processor import ProcessedPrompt
from vllm.v1.engine.output_processor import OutputProcessor
from vllm.v1.messages import EngineCoreOutput
from vllm.v1.metrics.engine_metrics import FINISH_REASONS, EngineMetrics, Histogram, token_bounds

EMPTY = LogprobsLists(*(np.zeros((9, 1), np.int32) for _ in range(4)), np.zeros(9, np.float32), 0)


def value(metrics: EngineMetrics, name: str, **labels: str) -> float | None:
    return metrics.registry.get_sample_value(f"vllm:{name}", labels)


def finished(metrics: EngineMetrics) -> dict[str, float | None]:
    return {reason: value(metrics, "request_success_total", finished_reason=reason) for reason in FINISH_REASONS}


def distributions(metrics: EngineMetrics, suffix: str) -> dict[str, float]:
    """The sum, or the count, of each histogram that has any values."""
    samples = {each.name: each.value for family in metrics.registry.collect() for each in family.samples}
    counts = {name: count for name, count in samples.items() if name.endswith("_count") and count}
    names = [name.removesuffix("_count") for name in counts]
    return {name.removeprefix("vllm:"): samples[name + suffix] for name in names}


def counts(metrics: EngineMetrics) -> dict[str, float]:
    return distributions(metrics, "_count")


def sums(metrics: EngineMetrics) -> dict[str, float]:
    return distributions(metrics, "_sum")


def test_histogram_counts_as_the_client_library_does():
    bounds = (0.5, 1.0, 2.5)
    ours, reference = (kind("h", "h", buckets=bounds, registry=None) for kind in (Histogram, ReferenceHistogram))
    for number in [0.5, 1.0, 2.5, *(random.Random(0).uniform(0, 4) for _ in range(200))]:
        ours.observe(number)
        reference.observe(number)
    for number in (0.75, 9.0):
        ours.observe(number, count=3)
        for _ in range(3):
            reference.observe(number)
    found, expected = (
        {(each.name, *each.labels.values()): each.value for each in next(iter(histogram.collect())).samples}
        for histogram in (ours, reference)
    )
    del found["h_created",], expected["h_created",]
    assert found == pytest.approx(expected)


@pytest.mark.parametrize(
    ("max_model_len", "bounds"),
    [(1, (1,)), (4, (1, 2)), (128, (1, 2, 5, 10, 20, 50, 100)), (1000, (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000))],
)
def test_token_bounds_end_with_the_context(max_model_len, bounds):
    assert token_bounds(max_model_len) == bounds


def test_one_sequence_from_arrival_to_end():
    metrics = EngineMetrics(128)
    params = SamplingParams(max_tokens=3, logprob_token_ids=[5, 6], logprobs=1)
    record = metrics.start(params, 40, arrival_time=100.0)
    row = [(EMPTY, 0)]
    first = EngineCoreOutput("r", [7], row, num_cached_tokens=16, scheduled_time=101.0)
    metrics.observe_step([(record, first, None)], step_time=103.0, now=103.5)
    metrics.observe_step([(record, EngineCoreOutput("r", [8], row), None)], 104.0, 104.5)
    metrics.observe_step([(record, EngineCoreOutput("r", [9], row), "length")], 106.0, 106.25)
    assert sums(metrics) == {
        "time_to_first_token_seconds": 3.5,
        "inter_token_latency_seconds": 1.0 + 2.0,
        "request_time_per_output_token_seconds": 1.5,
        "e2e_request_latency_seconds": 6.25,
        "request_queue_time_seconds": 1.0,
        "request_prefill_time_seconds": 2.0,
        "request_decode_time_seconds": 3.0,
        "request_inference_time_seconds": 5.0,
        "request_prompt_tokens": 40,
        "request_prefill_kv_computed_tokens": 24,
        "request_generation_tokens": 3,
        "request_params_max_tokens": 3,
        "iteration_tokens_total": (24 + 1) + 1 + 1,
    }
    assert (
        value(metrics, "prompt_tokens_total"),
        value(metrics, "prompt_tokens_cached_total"),
        value(metrics, "generation_tokens_total"),
    ) == (40, 16, 3)
    assert (value(metrics, "logprob_rows_read_total"), value(metrics, "logprob_token_ids_read_total")) == (3, 6)
    assert finished(metrics) == {"stop": 0, "length": 1, "abort": 0, "error": 0}


def test_sequences_of_a_step_are_counted_one_by_one():
    metrics = EngineMetrics(128)
    records = [metrics.start(SamplingParams(max_tokens=9), 10, 0.0) for _ in range(5)]
    begun = [(each, EngineCoreOutput("r", [1], scheduled_time=0.5), None) for each in records]
    metrics.observe_step(begun[:3], 1.0, 1.0)
    metrics.observe_step(begun[3:], 2.0, 2.0)
    metrics.observe_step([(each, EngineCoreOutput("r", [1]), None) for each in records], 4.0, 4.0)
    # Three have waited 3 s since their first token, two 2 s.
    assert sums(metrics)["inter_token_latency_seconds"] == 3 * 3 + 2 * 2
    assert counts(metrics) == {
        "time_to_first_token_seconds": 5,
        "inter_token_latency_seconds": 5,
        "iteration_tokens_total": 3,
    }
    assert sums(metrics)["iteration_tokens_total"] == 5 * 10 + 10


def test_a_prompt_alone_is_read():
    metrics = EngineMetrics(128)
    record = metrics.start(SamplingParams(max_tokens=0, prompt_logprob_token_ids=[4, 5, 6]), 9, 0.0)
    part = EngineCoreOutput("r", [], prompt_logprobs=[LogprobsRows(EMPTY, slice(0, 5), 3)])
    metrics.observe_step([(record, part, None)], 1.0, 1.0)
    assert counts(metrics) == {} and value(metrics, "prompt_tokens_total") == 0
    rest = EngineCoreOutput(
        "r", [], prompt_logprobs=[LogprobsRows(EMPTY, slice(5, 8), 3)], finish_reason="length", scheduled_time=0.5
    )
    metrics.observe_step([(record, rest, "length")], 2.0, 2.5)
    assert (value(metrics, "logprob_rows_read_total"), value(metrics, "logprob_token_ids_read_total")) == (8, 24)
    assert (value(metrics, "prompt_tokens_total"), value(metrics, "generation_tokens_total")) == (9, 0)
    assert sums(metrics)["time_to_first_token_seconds"] == sums(metrics)["e2e_request_latency_seconds"] == 2.5
    # No further token came whose time could be averaged.
    assert (
        "request_time_per_output_token_seconds" not in counts(metrics)
        and sums(metrics)["request_decode_time_seconds"] == 0
    )


@pytest.mark.parametrize("begun", [False, True])
def test_what_fails_has_no_latency(begun):
    metrics = EngineMetrics(128)
    record = metrics.start(SamplingParams(max_tokens=5), 9, 0.0)
    if begun:
        metrics.observe_step([(record, EngineCoreOutput("r", [1], scheduled_time=0.5), None)], 1.0, 1.0)
    before = counts(metrics)
    broken = EngineCoreOutput("r", [], finish_reason="error", error="broken")
    metrics.observe_step([(record, broken, "error")], 2.0, 2.0)
    assert counts(metrics) == before
    assert finished(metrics) == {"stop": 0, "length": 0, "abort": 0, "error": 1}


def test_the_output_processor_tells_of_every_sequence():
    metrics = EngineMetrics(128)
    processor = OutputProcessor(None, metrics)
    params = SamplingParams(max_tokens=9, n=3, detokenize=False, seed=1)
    children = [
        core_id for core_id, _ in processor.add_request("r", ProcessedPrompt(None, [1] * 20, None), params, 0.0)
    ]
    lengths = {children[0]: 1, children[1]: 4, children[2]: 2}
    for step in range(1, 5):
        running = [each for each in children if lengths[each] >= step]
        outputs = [
            EngineCoreOutput(each, [1], finish_reason="stop" if lengths[each] == step else None, scheduled_time=0.0)
            for each in running
        ]
        processor.process_outputs(outputs, float(step))
    assert finished(metrics)["stop"] == 3
    assert (value(metrics, "prompt_tokens_total"), value(metrics, "generation_tokens_total")) == (60, 7)
    assert sums(metrics)["request_generation_tokens"] == 7 and counts(metrics)["request_generation_tokens"] == 3
    assert (
        sums(metrics)["request_max_num_generation_tokens"] == 4
        and counts(metrics)["request_max_num_generation_tokens"] == 1
    )
    assert sums(metrics)["request_params_n"] == 3 and counts(metrics)["request_params_n"] == 1
    # By the steps' own times: 3 gaps of a second, then one, then one.
    assert sums(metrics)["inter_token_latency_seconds"] == 4


def test_dropped_requests_count_once():
    metrics = EngineMetrics(128)
    processor = OutputProcessor(None, metrics)
    for request_id, n in (("a", 1), ("b", 3), ("c", 1)):
        processor.add_request(
            request_id, ProcessedPrompt(None, [1], None), SamplingParams(max_tokens=9, n=n, detokenize=False), 0.0
        )
    processor.process_outputs([EngineCoreOutput("0_b", [1], finish_reason="length", scheduled_time=0.0)], 1.0)
    assert sorted(processor.abort_requests(["b", "a", "a", "nobody"])) == ["1_b", "2_b", "a"]
    processor.process_outputs([EngineCoreOutput("a", [1])], 2.0)
    processor.abort_requests(["c"], "error")
    assert finished(metrics) == {"stop": 0, "length": 1, "abort": 3, "error": 1}
    assert value(metrics, "generation_tokens_total") == 1
