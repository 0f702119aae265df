"""Tracers and decorators of callers' own."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from vllm.tracing import TRACE_HEADERS, provider

if TYPE_CHECKING:
    from opentelemetry.trace import Tracer


def init_tracer(
    instrumenting_module_name: str, otlp_traces_endpoint: str, extra_attributes: Mapping[str, str] | None = None
) -> Tracer:
    """A tracer whose spans go to the collector in batches, by gRPC, or by HTTP with
    OTEL_EXPORTER_OTLP_TRACES_PROTOCOL=http/protobuf; OpenTelemetry's other variables count, too.

    Args:
        instrumenting_module_name: who makes the spans.
        extra_attributes: of the resource, beside service.name (OTEL_SERVICE_NAME, or "vllm").

    Raises:
        VLLMValidationError: see check_endpoint.
    """
    return provider(otlp_traces_endpoint, extra_attributes).get_tracer(instrumenting_module_name)


def contains_trace_headers(headers: Mapping[str, str]) -> bool:
    """Whether the headers continue a trace."""
    return any(name in headers for name in TRACE_HEADERS)


def instrument(
    obj: Any = None,
    *,
    span_name: str = "",
    attributes: Mapping[str, str] | None = None,
    record_exception: bool = True,
) -> Any:
    """A decorator that leaves a function as it is: spans are of requests alone."""
    return (lambda function: function) if obj is None else obj
