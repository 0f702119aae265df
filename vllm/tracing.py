"""OpenTelemetry: a span for each request, sent to a collector. The library is the extra `otel`, imported when used."""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import os
import time
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from vllm.exceptions import VLLMValidationError
from vllm.logger import init_logger, warn_once
from vllm.sampling_params import SamplingParams

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.outputs import RequestMetrics

logger = init_logger(__name__)

TRACE_HEADERS = ("traceparent", "tracestate")
"""W3C's headers of the caller's trace."""

_PROTOCOL_VARIABLES = ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL")
_EXPORTERS = {
    "grpc": "opentelemetry.exporter.otlp.proto.grpc.trace_exporter",
    "http/protobuf": "opentelemetry.exporter.otlp.proto.http.trace_exporter",
}


class SpanAttributes:
    """Names of a span's attributes, by the semantic conventions for generative AI and upstream's additions to them.
    Latencies are in seconds."""

    GEN_AI_REQUEST_ID = "gen_ai.request.id"
    GEN_AI_REQUEST_MAX_TOKENS = "gen_ai.request.max_tokens"
    GEN_AI_REQUEST_N = "gen_ai.request.n"
    GEN_AI_REQUEST_TEMPERATURE = "gen_ai.request.temperature"
    GEN_AI_REQUEST_TOP_P = "gen_ai.request.top_p"
    GEN_AI_RESPONSE_MODEL = "gen_ai.response.model"
    GEN_AI_RESPONSE_FINISH_REASONS = "gen_ai.response.finish_reasons"
    GEN_AI_USAGE_PROMPT_TOKENS = "gen_ai.usage.prompt_tokens"
    GEN_AI_USAGE_COMPLETION_TOKENS = "gen_ai.usage.completion_tokens"
    GEN_AI_USAGE_NUM_SEQUENCES = "gen_ai.usage.num_sequences"
    GEN_AI_LATENCY_TIME_IN_QUEUE = "gen_ai.latency.time_in_queue"
    GEN_AI_LATENCY_TIME_TO_FIRST_TOKEN = "gen_ai.latency.time_to_first_token"
    GEN_AI_LATENCY_E2E = "gen_ai.latency.e2e"
    GEN_AI_LATENCY_TIME_IN_MODEL_PREFILL = "gen_ai.latency.time_in_model_prefill"
    GEN_AI_LATENCY_TIME_IN_MODEL_DECODE = "gen_ai.latency.time_in_model_decode"
    GEN_AI_LATENCY_TIME_IN_MODEL_INFERENCE = "gen_ai.latency.time_in_model_inference"


def is_otel_available() -> bool:
    """Whether OpenTelemetry's SDK is installed."""
    return _is_installed("opentelemetry.sdk.trace")


def check_endpoint(endpoint: Any) -> None:
    """Check an endpoint, and that what sends to it is installed; imports nothing of it.

    Raises:
        VLLMValidationError: not an address, a protocol that is not known, or the extra `otel` is not installed.
    """
    if not isinstance(endpoint, str) or not endpoint.strip():
        message = f"otlp_traces_endpoint must be a collector's address such as http://127.0.0.1:4317, got {endpoint!r}"
        raise VLLMValidationError(message, "otlp_traces_endpoint", endpoint)
    protocol = _protocol()
    if protocol not in _EXPORTERS:
        name = _PROTOCOL_VARIABLES[0]
        message = f"{name} must be one of {', '.join(_EXPORTERS)}, got {protocol!r}"
        raise VLLMValidationError(message, name, protocol)
    if protocol == "http/protobuf" and not endpoint.startswith(("http://", "https://")):
        message = f"otlp_traces_endpoint must be a URL of http or https for {protocol}, got {endpoint!r}"
        raise VLLMValidationError(message, "otlp_traces_endpoint", endpoint)
    if not is_otel_available() or not _is_installed(_EXPORTERS[protocol]):
        message = f"otlp_traces_endpoint={endpoint!r} needs OpenTelemetry: pip install 'vllm[otel]'"
        raise VLLMValidationError(message, "otlp_traces_endpoint", endpoint)


def extract_trace_headers(headers: Mapping[str, str]) -> dict[str, str]:
    """The headers that continue a trace."""
    return {name: headers[name] for name in TRACE_HEADERS if name in headers}


def has_current_span() -> bool:
    """Whether this code runs within a span, such as one of what instruments a web application."""
    from opentelemetry.trace import get_current_span

    return get_current_span().get_span_context().is_valid


class RequestTracer:
    """Makes the `llm_request` spans of an engine.

    Args:
        endpoint: the collector's address.
        model: the model's name, for gen_ai.response.model.
    """

    def __init__(self, endpoint: str, model: str) -> None:
        self._provider = provider(endpoint, None)
        self._tracer = self._provider.get_tracer("vllm.llm_engine")
        self._model = model

    def caller(self) -> Any:
        """The trace that is current now: the parent of a request that is added now."""
        from opentelemetry import context

        return context.get_current()

    def end_request(
        self,
        caller: Any,
        request_id: str,
        params: SamplingParams,
        metrics: RequestMetrics,
        *,
        num_prompt_tokens: int,
        num_completion_tokens: int,
        finish_reasons: list[str],
    ) -> None:
        """Record a request that ends now. `caller`: what `caller` returned when it was added."""
        from opentelemetry.trace import SpanKind, Status, StatusCode

        end, end_ns = metrics.finished_time or time.monotonic(), time.time_ns()
        attributes = {
            SpanAttributes.GEN_AI_RESPONSE_MODEL: self._model,
            SpanAttributes.GEN_AI_REQUEST_ID: request_id,
            SpanAttributes.GEN_AI_REQUEST_TEMPERATURE: params.temperature,
            SpanAttributes.GEN_AI_REQUEST_TOP_P: params.top_p,
            SpanAttributes.GEN_AI_REQUEST_MAX_TOKENS: params.max_tokens,
            SpanAttributes.GEN_AI_REQUEST_N: params.n,
            SpanAttributes.GEN_AI_USAGE_NUM_SEQUENCES: params.num_sequences,
            SpanAttributes.GEN_AI_USAGE_PROMPT_TOKENS: num_prompt_tokens,
            SpanAttributes.GEN_AI_USAGE_COMPLETION_TOKENS: num_completion_tokens,
            SpanAttributes.GEN_AI_RESPONSE_FINISH_REASONS: finish_reasons,
            **_latencies(metrics, end),
        }
        start_ns = end_ns - int((end - metrics.arrival_time) * 1e9)
        span = self._tracer.start_span("llm_request", caller, SpanKind.SERVER, attributes, start_time=start_ns)
        if "error" in finish_reasons:
            span.set_status(Status(StatusCode.ERROR))
        span.end(end_ns)

    def shutdown(self) -> None:
        """Send what is left; no further spans. At the end of the process this happens by itself."""
        self._provider.shutdown()


def make_tracer(config: VllmConfig) -> RequestTracer | None:
    """The tracer of an engine; None: it does not trace."""
    endpoint = config.otlp_traces_endpoint
    if not endpoint:
        return None
    return RequestTracer(endpoint, (*config.model_config.served_model_name, config.model_config.model)[0])


@contextlib.contextmanager
def continued(tracer: RequestTracer | None, trace_headers: Mapping[str, str] | None) -> Iterator[None]:
    """Within it, the trace of the W3C headers is current.

    Raises:
        VLLMValidationError: not a mapping of strings.
    """
    if trace_headers is not None and not (
        isinstance(trace_headers, Mapping)
        and all(isinstance(each, str) for pair in trace_headers.items() for each in pair)
    ):
        message = f"trace_headers must be a dict of strings such as traceparent, got {trace_headers!r}"
        raise VLLMValidationError(message, "trace_headers", trace_headers)
    if not trace_headers:
        yield
    elif tracer is None:
        warn_once(logger, "trace_headers change nothing without otlp_traces_endpoint: requests are not traced")
        yield
    else:
        from opentelemetry import context
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        lower = {name.lower(): value for name, value in trace_headers.items()}
        token = context.attach(TraceContextTextMapPropagator().extract(lower))
        try:
            yield
        finally:
            context.detach(token)


def _latencies(metrics: RequestMetrics, end: float) -> dict[str, float]:
    """Latencies of the stages that a request has reached, in seconds."""
    arrival, scheduled, first = metrics.arrival_time, metrics.first_scheduled_time, metrics.first_token_time
    found = {SpanAttributes.GEN_AI_LATENCY_E2E: end - arrival}
    if scheduled is not None:
        found[SpanAttributes.GEN_AI_LATENCY_TIME_IN_QUEUE] = scheduled - arrival
        found[SpanAttributes.GEN_AI_LATENCY_TIME_IN_MODEL_INFERENCE] = end - scheduled
    if first is not None:
        found[SpanAttributes.GEN_AI_LATENCY_TIME_TO_FIRST_TOKEN] = first - arrival
        found[SpanAttributes.GEN_AI_LATENCY_TIME_IN_MODEL_DECODE] = end - first
    if scheduled is not None and first is not None:
        found[SpanAttributes.GEN_AI_LATENCY_TIME_IN_MODEL_PREFILL] = first - scheduled
    return found


def provider(endpoint: str, extra_attributes: Mapping[str, str] | None) -> Any:
    """A provider of its own: engines of one process may send to different collectors."""
    check_endpoint(endpoint)
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor

    exporter = importlib.import_module(_EXPORTERS[_protocol()]).OTLPSpanExporter(endpoint=endpoint)
    name = {} if os.environ.get("OTEL_SERVICE_NAME") else {"service.name": "vllm"}
    made = TracerProvider(resource=Resource.create({**name, **(extra_attributes or {})}))
    made.add_span_processor(BatchSpanProcessor(exporter))
    return made


def _protocol() -> str:
    return next((value for name in _PROTOCOL_VARIABLES if (value := os.environ.get(name))), "grpc")


def _is_installed(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:
        return False
