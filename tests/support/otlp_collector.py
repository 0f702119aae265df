"""Collectors of OpenTelemetry's traces on 127.0.0.1, by HTTP and by gRPC: what they got, decoded."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)

WAIT_SECONDS = 30.0


class Collector:
    """Holds the spans that came. Close it by leaving its context."""

    def __init__(self) -> None:
        self.spans: list[Any] = []  # opentelemetry.proto.trace.v1.Span
        self.resources: list[dict[str, Any]] = []

    def take(self, request: ExportTraceServiceRequest) -> None:
        for each in request.resource_spans:
            self.resources.append(attributes_of(each.resource))
            for scope in each.scope_spans:
                self.spans.extend(scope.spans)

    def wait_for(self, count: int) -> list[Any]:
        """The spans, once there are `count`."""
        deadline = time.monotonic() + WAIT_SECONDS
        while len(self.spans) < count and time.monotonic() < deadline:
            time.sleep(0.02)
        assert len(self.spans) == count
        return self.spans

    def __enter__(self) -> Collector:
        return self

    def __exit__(self, *_: object) -> None:
        raise NotImplementedError


class HttpCollector(Collector):
    """`endpoint` is its URL."""

    def __init__(self) -> None:
        super().__init__()
        collector = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["content-length"]))
                collector.take(ExportTraceServiceRequest.FromString(body))
                self.send_response(200)
                self.end_headers()

            def log_message(self, *_: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.endpoint = f"http://127.0.0.1:{self._server.server_port}/v1/traces"
        threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True).start()

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()


class GrpcCollector(Collector):
    """`endpoint` is its URL, without TLS."""

    def __init__(self) -> None:
        import grpc
        from opentelemetry.proto.collector.trace.v1.trace_service_pb2_grpc import (
            TraceServiceServicer,
            add_TraceServiceServicer_to_server,
        )

        super().__init__()
        collector = self

        class Servicer(TraceServiceServicer):
            def Export(self, request: ExportTraceServiceRequest, context: Any) -> ExportTraceServiceResponse:
                collector.take(request)
                return ExportTraceServiceResponse()

        self._server = grpc.server(ThreadPoolExecutor(1))
        add_TraceServiceServicer_to_server(Servicer(), self._server)
        port = self._server.add_insecure_port("127.0.0.1:0")
        self._server.start()
        self.endpoint = f"http://127.0.0.1:{port}"

    def __exit__(self, *_: object) -> None:
        self._server.stop(None).wait()


def attributes_of(span: Any) -> dict[str, Any]:
    """The attributes of a span or a resource, as Python values."""
    return {each.key: _value(each.value) for each in span.attributes}


def _value(value: Any) -> Any:
    kind = value.WhichOneof("value")
    if kind == "array_value":
        return [_value(each) for each in value.array_value.values]
    return getattr(value, kind)
