"""An engine's metrics as Prometheus reads them: names, types, labels, values."""

from __future__ import annotations

import os
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
from prometheus_client import generate_latest
from prometheus_client.parser import text_string_to_metric_families

from vllm.config import CacheConfig, LoRAConfig
from vllm.sampling_params import SamplingParams
from vllm.server.prometheus import make_registry
from vllm.v1.messages import EngineCoreOutput
from vllm.v1.metrics.engine_metrics import EngineMetrics

# Dashboards and autoscalers made for vLLM ask for these.
EXPECTED = {
    "gauge": "num_requests_running num_requests_waiting num_requests_waiting_by_reason engine_sleep_state "
    "kv_cache_usage_perc cpu_cache_usage_perc cache_config_info",
    "counter": "num_preemptions prefix_cache_queries prefix_cache_hits prompt_tokens prompt_tokens_cached "
    "prompt_tokens_by_source prompt_tokens_recomputed external_prefix_cache_queries external_prefix_cache_hits "
    "mm_cache_queries mm_cache_hits "
    "generation_tokens request_success logprob_token_ids_read logprob_rows_read readings_seconds "
    "spec_decode_num_drafts spec_decode_num_draft_tokens spec_decode_num_accepted_tokens "
    "spec_decode_num_accepted_tokens_per_pos tp_collective_bytes tp_collective_calls "
    "kv_blocks_swapped_out kv_blocks_swapped_in kv_blocks_stored kv_blocks_loaded",
    "histogram": "time_to_first_token_seconds inter_token_latency_seconds request_time_per_output_token_seconds "
    "e2e_request_latency_seconds request_queue_time_seconds request_prefill_time_seconds "
    "request_decode_time_seconds request_inference_time_seconds request_prompt_tokens request_generation_tokens "
    "request_max_num_generation_tokens request_prefill_kv_computed_tokens request_params_n "
    "request_params_max_tokens iteration_tokens_total",
}

# A page of upstream's has these beside them, with its default flags.
UPSTREAM = """
python_info python_gc_objects_collected python_gc_objects_uncollectable python_gc_collections
process_virtual_memory_bytes
process_resident_memory_bytes process_start_time_seconds process_cpu_seconds process_open_fds process_max_fds
http_requests http_request_duration_seconds http_request_duration_highr_seconds http_request_size_bytes
http_response_size_bytes
"""
# These are the server's, not the engine's: test_metrics.py.
HTTP = ("http_requests", "http_request_duration_seconds")


def make_replica(**fields) -> SimpleNamespace:
    """The part of a Replica that the metrics look at."""
    values = {
        "metrics": EngineMetrics(128),
        "stats": {},
        "is_dead": False,
        "num_unfinished_sequences": 0,
        "core": SimpleNamespace(num_blocks=77),
    }
    return SimpleNamespace(**{**values, **fields})


def make_engine(*replicas: SimpleNamespace, lora_config=None, **fields) -> SimpleNamespace:
    """The part of AsyncLLM that the metrics look at: these replicas, or one with these fields."""
    replicas = replicas or (make_replica(**fields),)
    config = SimpleNamespace(cache_config=CacheConfig(block_size=32), lora_config=lora_config)
    pids = [os.getpid()] * len(replicas)
    return SimpleNamespace(replicas=replicas, vllm_config=config, core_pids=pids, sleep_level=0)


def scrape(engine: SimpleNamespace, model_name: str = "tiny"):
    """Families by name, and samples by (name, labels)."""
    families = list(text_string_to_metric_families(generate_latest(make_registry(engine, model_name)).decode()))
    samples = {(s.name, *sorted(s.labels.items())): s.value for family in families for s in family.samples}
    return {family.name: family for family in families}, samples


def value(samples, name: str, **labels) -> float:
    return samples[(f"vllm:{name}", *sorted({"model_name": "tiny", "engine": "0", **labels}.items()))]


def test_names_and_types():
    families, _ = scrape(make_engine())
    own = {name.removeprefix("vllm:"): family.type for name, family in families.items() if name.startswith("vllm:")}
    assert own == {name: kind for kind, names in EXPECTED.items() for name in names.split()}


def test_all_series_are_there_from_the_start():
    families, samples = scrape(make_engine())
    for name, family in families.items():
        if not name.startswith("vllm:") or name == "vllm:cache_config_info":
            continue
        assert family.samples and family.documentation
        for sample in family.samples:
            awake = sample.labels.get("sleep_state") == "awake"
            assert sample.value == awake and sample.labels["model_name"] == "tiny" and sample.labels["engine"] == "0"
    for reason in ("stop", "length", "abort", "error"):
        assert value(samples, "request_success_total", finished_reason=reason) == 0


def test_the_core_counts_arrive():
    stats = {
        "num_running": 3,
        "num_waiting": 2,
        "kv_cache_usage": 0.25,
        "num_prefix_queried_tokens": 100,
        "num_prefix_hit_tokens": 64,
        "num_preemptions": 1,
        "num_swapped_out_blocks": 5,
        "num_swapped_in_blocks": 2,
        "host_cache_usage": 0.75,
        "readings_seconds": 1.5,
        "num_drafts": 4,
        "num_draft_tokens": 12,
        "num_accepted_tokens": 5,
        "num_accepted_tokens_per_pos": [3, 2, 0],
        "collective_bytes": {"all_reduce": 4096},
        "collective_calls": {"all_reduce": 2},
        "time": 9.0,
    }
    _, samples = scrape(make_engine(stats=stats, num_unfinished_sequences=5))
    assert value(samples, "num_requests_running") == 3
    assert value(samples, "num_requests_waiting") == 2
    assert value(samples, "kv_cache_usage_perc") == 0.25
    assert value(samples, "prefix_cache_queries_total") == 100
    assert value(samples, "prefix_cache_hits_total") == 64
    assert value(samples, "num_preemptions_total") == 1
    assert value(samples, "kv_blocks_swapped_out_total") == 5
    assert value(samples, "kv_blocks_swapped_in_total") == 2
    assert value(samples, "cpu_cache_usage_perc") == 0.75
    assert value(samples, "readings_seconds_total") == 1.5
    assert value(samples, "spec_decode_num_drafts_total") == 4
    assert value(samples, "spec_decode_num_draft_tokens_total") == 12
    assert value(samples, "spec_decode_num_accepted_tokens_total") == 5
    for position, count in enumerate((3, 2, 0)):
        assert value(samples, "spec_decode_num_accepted_tokens_per_pos_total", position=str(position)) == count
    assert value(samples, "tp_collective_bytes_total", collective="all_reduce") == 4096
    assert value(samples, "tp_collective_calls_total", collective="all_reduce") == 2
    assert value(samples, "tp_collective_bytes_total", collective="gather") == 0


@pytest.mark.parametrize(
    ("stats", "num_unfinished", "waiting"),
    [
        ({}, 4, 4),  # no step has been told of yet
        ({"num_running": 2, "num_waiting": 0}, 7, 5),  # more have come since
        ({"num_running": 2, "num_waiting": 3}, 0, 3),  # the core is being told that they were aborted
    ],
)
def test_waiting_requests_include_those_that_the_core_has_not_seen(stats, num_unfinished, waiting):
    _, samples = scrape(make_engine(stats=stats, num_unfinished_sequences=num_unfinished))
    assert value(samples, "num_requests_waiting") == waiting


def test_a_dead_engine_holds_nothing_but_its_counts_stay():
    stats = {
        "num_running": 3,
        "num_waiting": 2,
        "kv_cache_usage": 0.5,
        "host_cache_usage": 0.5,
        "num_prefix_hit_tokens": 64,
    }
    _, samples = scrape(make_engine(stats=stats, is_dead=True))
    for name in ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc", "cpu_cache_usage_perc"):
        assert value(samples, name) == 0
    assert value(samples, "prefix_cache_hits_total") == 64


def test_a_histogram_is_cumulative():
    engine = make_engine()
    for each in (0.02, 0.03, 100.0):
        engine.replicas[0].metrics.inter_token_latency.observe(each)
    _, samples = scrape(engine)
    buckets = {
        float(dict(key[1:])["le"]): count
        for key, count in samples.items()
        if key[0] == "vllm:inter_token_latency_seconds_bucket"
    }
    assert [buckets[bound] for bound in (0.01, 0.025, 0.05, 80.0, float("inf"))] == [0, 1, 2, 2, 3]
    assert value(samples, "inter_token_latency_seconds_count") == 3
    assert value(samples, "inter_token_latency_seconds_sum") == pytest.approx(100.05)


def test_adapters_with_requests_are_named():
    stats = {"running_adapters": ("a", "b"), "waiting_adapters": ("c",)}
    engine = make_engine(make_replica(stats=stats), lora_config=LoRAConfig(max_loras=2))
    _, samples = scrape(engine)
    labels = {"engine": "0", "max_lora": "2", "running_lora_adapters": "a,b", "waiting_lora_adapters": "c"}
    assert 0 <= time.time() - samples[("vllm:lora_requests_info", *labels.items())] < 100


def test_the_cache_is_described():
    families, _ = scrape(make_engine())
    (sample,) = families["vllm:cache_config_info"].samples
    assert sample.value == 1
    assert sample.labels == {
        "block_size": "32",
        "cache_dtype": "auto",
        "enable_prefix_caching": "True",
        "gpu_memory_utilization": "0.9",
        "swap_space": "0.0",
        "num_gpu_blocks": "77",
        "engine": "0",
    }


def test_both_processes_are_watched():
    families, samples = scrape(make_engine())
    for prefix, labels in ("", ()), ("vllm_engine_core_", (("engine", "0"),)):
        assert samples[(f"{prefix}process_resident_memory_bytes", *labels)] > 2**20
        assert families[f"{prefix}process_cpu_seconds"].type == "counter"


def test_replicas_are_told_apart():
    replicas = [
        make_replica(stats={"num_running": 3, "num_preemptions": 1}),
        make_replica(stats={"num_running": 2, "num_preemptions": 4}, is_dead=True, core=SimpleNamespace(num_blocks=5)),
    ]
    replicas[1].metrics.inter_token_latency.observe(0.02)
    families, samples = scrape(make_engine(*replicas))
    for engine, running, preemptions, tokens in ("0", 3, 1, 0), ("1", 0, 4, 1):
        assert value(samples, "num_requests_running", engine=engine) == running
        assert value(samples, "num_preemptions_total", engine=engine) == preemptions
        assert value(samples, "inter_token_latency_seconds_count", engine=engine) == tokens
        assert value(samples, "request_success_total", engine=engine, finished_reason="stop") == 0
        assert samples[("vllm_engine_core_process_resident_memory_bytes", ("engine", engine))] > 2**20
    blocks = [each.labels["num_gpu_blocks"] for each in families["vllm:cache_config_info"].samples]
    assert blocks == ["77", "5"]
    # One process serves.
    assert len(families["process_resident_memory_bytes"].samples) == 1


def test_a_model_name_may_hold_anything():
    _, samples = scrape(make_engine(), 'a "b"\\\n🙂')
    assert ("vllm:num_requests_running", ("engine", "0"), ("model_name", 'a "b"\\\n🙂')) in samples


def test_prompt_tokens_by_source_add_up():
    replica = make_replica()
    record = replica.metrics.start(SamplingParams(max_tokens=2), 9, 0.0)
    output = EngineCoreOutput("a", [5], num_cached_tokens=4, scheduled_time=0.5)
    replica.metrics.observe_step([(record, output, None)], 1.0, 1.0)
    _, samples = scrape(make_engine(replica))
    counts = {"local_compute": 5, "local_cache_hit": 4, "external_kv_transfer": 0}
    for source, count in counts.items():
        assert value(samples, "prompt_tokens_by_source_total", source=source) == count
    assert value(samples, "prompt_tokens_total") == 9


@pytest.mark.parametrize(("level", "state"), list(enumerate(["awake", "weights_offloaded", "discard_all"])))
def test_one_sleep_state_holds(level, state):
    engine = make_engine()
    engine.sleep_level = level
    _, samples = scrape(engine)
    for each in ("awake", "weights_offloaded", "discard_all"):
        assert value(samples, "engine_sleep_state", sleep_state=each) == (each == state)


def test_those_who_wait_are_told_apart():
    _, samples = scrape(make_engine(stats={"num_running": 2, "num_waiting": 3, "num_preparing": 1}))
    assert value(samples, "num_requests_waiting") == 4
    assert value(samples, "num_requests_waiting_by_reason", reason="capacity") == 3
    assert value(samples, "num_requests_waiting_by_reason", reason="deferred") == 1


def test_what_upstream_shows_is_there_or_has_a_reason():
    families, _ = scrape(make_engine())
    page = (Path(__file__).parents[2] / "docs/metrics.md").read_text()
    _, _, reasons = page.partition("### Names that are not here")
    for name in UPSTREAM.split():
        assert name in families or f"`{name}`" in reasons or name in HTTP, name
