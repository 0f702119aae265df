"""Requests are spans of their callers' traces, sent to a real collector."""

from __future__ import annotations

import asyncio
import importlib.util
import subprocess
import sys
import time
from pathlib import Path

import pytest
from live_server import LiveServer

pytest.importorskip("opentelemetry.sdk.trace")
pytest.importorskip("opentelemetry.exporter.otlp.proto.http")

import httpx
from otlp_collector import GrpcCollector, HttpCollector, attributes_of
from tiny_llm import make_tiny_llm, make_tiny_model

from vllm import AsyncEngineArgs, AsyncLLM, EngineArgs, SamplingParams
from vllm.tracing import SpanAttributes, check_endpoint, contains_trace_headers, extract_trace_headers, init_tracer

TRACE, PARENT = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
HEADERS = {"traceparent": f"00-{TRACE}-{PARENT}-01"}
PROTOCOL = "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL"


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("model"))


@pytest.fixture
def collector(monkeypatch):
    monkeypatch.setenv(PROTOCOL, "http/protobuf")
    with HttpCollector() as found:
        yield found


def test_a_request_is_a_span_with_what_was_asked_and_what_it_took(model, collector):
    llm = make_tiny_llm(model, otlp_traces_endpoint=collector.endpoint, served_model_name="tiny")
    params = SamplingParams(n=2, temperature=0.5, top_p=0.75, max_tokens=4, ignore_eos=True, seed=1)
    before = time.time_ns()
    (output,) = llm.generate(["abc"], params, use_tqdm=False)
    after = time.time_ns()
    llm.llm_engine.tracer.shutdown()
    (span,) = collector.wait_for(1)
    found = attributes_of(span)
    latencies = {name: found.pop(name) for name in list(found) if ".latency." in name}
    assert span.name == "llm_request"
    assert found == {
        "gen_ai.response.model": "tiny",
        "gen_ai.request.id": output.request_id,
        "gen_ai.request.max_tokens": 4,
        "gen_ai.request.n": 2,
        "gen_ai.request.temperature": 0.5,
        "gen_ai.request.top_p": 0.75,
        "gen_ai.usage.num_sequences": 2,
        "gen_ai.usage.prompt_tokens": len(output.prompt_token_ids),
        "gen_ai.usage.completion_tokens": 8,
        "gen_ai.response.finish_reasons": ["length", "length"],
    }
    queue, first, whole = (
        latencies[f"gen_ai.latency.{name}"] for name in ("time_in_queue", "time_to_first_token", "e2e")
    )
    assert 0 <= queue < first < whole
    prefill, decode, inference = (
        latencies[f"gen_ai.latency.time_in_model_{name}"] for name in ("prefill", "decode", "inference")
    )
    assert queue + prefill == pytest.approx(first) and first + decode == pytest.approx(whole)
    assert prefill + decode == pytest.approx(inference)
    # The span's clock is the wall's; a millisecond for the two clocks to be read.
    assert before - 1_000_000 <= span.start_time_unix_nano < span.end_time_unix_nano <= after
    assert (span.end_time_unix_nano - span.start_time_unix_nano) / 1e9 == pytest.approx(whole, abs=1e-3)
    assert span.parent_span_id == b""
    assert collector.resources[0]["service.name"] == "vllm"


def test_trace_headers_continue_a_trace(model, collector):
    llm = make_tiny_llm(model, otlp_traces_endpoint=collector.endpoint)
    params = SamplingParams(max_tokens=1)
    llm.generate(["a", "b"], params, use_tqdm=False, trace_headers=HEADERS)
    llm.generate(["c"], params, use_tqdm=False)
    llm.llm_engine.add_request("own", "d", params, trace_headers={"Traceparent": HEADERS["traceparent"]})
    while llm.llm_engine.has_unfinished_requests():
        llm.llm_engine.step()
    llm.llm_engine.tracer.shutdown()
    spans = collector.wait_for(4)
    parents = [(span.trace_id.hex() == TRACE, span.parent_span_id.hex()) for span in spans]
    assert parents == [(True, PARENT), (True, PARENT), (False, ""), (True, PARENT)]


def test_a_current_span_of_the_caller_is_the_parent(model, collector):
    llm = make_tiny_llm(model, otlp_traces_endpoint=collector.endpoint)
    tracer = init_tracer("caller", collector.endpoint)
    with tracer.start_as_current_span("caller") as own:
        llm.generate(["a"], SamplingParams(max_tokens=1), use_tqdm=False)
    llm.llm_engine.tracer.shutdown()
    (span,) = collector.wait_for(1)
    assert span.parent_span_id == own.get_span_context().span_id.to_bytes(8, "big")


def test_a_request_that_is_aborted_has_its_span_too(model, collector):
    llm = make_tiny_llm(model, otlp_traces_endpoint=collector.endpoint)
    llm.llm_engine.add_request("waiting", "a", SamplingParams(max_tokens=9))
    llm.llm_engine.abort_request(["waiting", "unknown"])
    llm.llm_engine.tracer.shutdown()
    (span,) = collector.wait_for(1)
    found = attributes_of(span)
    assert found[SpanAttributes.GEN_AI_RESPONSE_FINISH_REASONS] == ["abort"]
    assert found[SpanAttributes.GEN_AI_USAGE_COMPLETION_TOKENS] == 0
    assert SpanAttributes.GEN_AI_LATENCY_TIME_TO_FIRST_TOKEN not in found


def test_the_engine_of_an_event_loop(model, collector):
    arguments = AsyncEngineArgs(str(model), dtype="float32", otlp_traces_endpoint=collector.endpoint)
    engine = AsyncLLM.from_engine_args(arguments)

    async def generate(request_id: str, **options) -> None:
        async for _ in engine.generate("abc", SamplingParams(max_tokens=2), request_id, **options):
            pass

    async def run() -> bool:
        await asyncio.gather(generate("with", trace_headers=HEADERS), generate("without"))
        return await engine.is_tracing_enabled()

    try:
        assert asyncio.run(run())
    finally:
        engine.shutdown()
    spans = {attributes_of(span)["gen_ai.request.id"]: span for span in collector.wait_for(2)}
    assert spans["with"].trace_id.hex() == TRACE and spans["with"].parent_span_id.hex() == PARENT
    assert spans["without"].trace_id.hex() != TRACE


def test_a_server_over_grpc():
    pytest.importorskip("grpc")
    pytest.importorskip("opentelemetry.exporter.otlp.proto.grpc")
    with GrpcCollector() as collector:
        flags = ("--otlp-traces-endpoint", collector.endpoint)
        with LiveServer(None, *flags, env={"OTEL_SERVICE_NAME": "scores"}) as server:
            body = {"prompt": ["a", "b"], "max_tokens": 1}
            answer = httpx.post(f"{server.url}/v1/completions", json=body, headers=HEADERS, timeout=60)
            assert answer.status_code == 200
            assert server.stop() == 0
        spans = collector.wait_for(2)
    assert {(span.trace_id.hex(), span.parent_span_id.hex()) for span in spans} == {(TRACE, PARENT)}
    assert all(attributes_of(span)["gen_ai.request.id"].startswith(answer.json()["id"]) for span in spans)
    assert collector.resources[0]["service.name"] == "scores"


def test_no_library_no_start(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(
        ValueError, match=r"otlp_traces_endpoint='http://x' needs OpenTelemetry: pip install 'vllm\[otel\]'"
    ):
        EngineArgs(otlp_traces_endpoint="http://x").create_engine_config()


def test_bad_endpoints_and_headers(model, monkeypatch):
    with pytest.raises(ValueError, match="otlp_traces_endpoint must be a collector's address .* got 5"):
        check_endpoint(5)
    monkeypatch.setenv(PROTOCOL, "http/protobuf")
    with pytest.raises(ValueError, match="otlp_traces_endpoint must be a URL of http or https"):
        check_endpoint("127.0.0.1:4318")
    monkeypatch.setenv(PROTOCOL, "thrift")
    with pytest.raises(ValueError, match=f"{PROTOCOL} must be one of grpc, http/protobuf, got 'thrift'"):
        check_endpoint("http://x")
    llm = make_tiny_llm(model)
    with pytest.raises(ValueError, match="trace_headers must be a dict of strings"):
        llm.generate(["a"], use_tqdm=False, trace_headers={"traceparent": 1})
    with pytest.raises(ValueError, match="collect_detailed_traces=.* is not supported: a request's span"):
        EngineArgs(str(model), collect_detailed_traces=["all"]).create_engine_config()


def test_headers_without_tracing_are_a_warning(model, caplog, monkeypatch):
    monkeypatch.setattr("vllm.logger._seen", set())
    llm = make_tiny_llm(model)
    with caplog.at_level("WARNING", logger="vllm"):
        llm.generate(["a"], SamplingParams(max_tokens=1), use_tqdm=False, trace_headers=HEADERS)
    assert "trace_headers change nothing without otlp_traces_endpoint" in caplog.text


def test_headers_of_a_trace():
    given = {"traceparent": "a", "tracestate": "b", "accept": "c"}
    assert extract_trace_headers(given) == {"traceparent": "a", "tracestate": "b"}
    assert contains_trace_headers(given) and not contains_trace_headers({"accept": "c"})


def test_the_library_is_imported_only_when_used(model):
    code = (
        "import sys; from vllm import LLM, SamplingParams; "
        f"LLM({str(model)!r}, dtype='float32').generate(['a'], SamplingParams(max_tokens=1), use_tqdm=False); "
        "sys.exit(any(name.startswith('opentelemetry') for name in sys.modules))"
    )
    assert subprocess.run([sys.executable, "-c", code], timeout=120).returncode == 0
