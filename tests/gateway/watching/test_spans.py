"""Spans: a client's trace goes on through the gateway to its workers, and nothing is recorded unless asked."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest

from coterie.errors import ConfigError
from coterie.gateway.watching.spans import ATTRIBUTES, NO_SPAN, Headers, Spans, exporter_kind

TRACE = "0af7651916cd43dd8448eb211c80319c"
PARENT = "b7ad6b7169203331"
CLIENT: Headers = [
    (b"host", b"gateway"),
    (b"traceparent", f"00-{TRACE}-{PARENT}-01".encode()),
    (b"tracestate", b"vendor=1"),
    (b"x-request-id", b"7"),
]


def test_without_variables_nothing_is_recorded_and_headers_pass() -> None:
    spans = Spans.from_environment({})
    span = spans.request("POST /v1/completions", CLIENT)
    assert spans.tracer is None
    assert span is NO_SPAN
    assert span.child("decode") is NO_SPAN
    assert span.outgoing(CLIENT) is CLIENT
    span.note(pool="decode")
    span.end("timeout")
    spans.close()


def test_the_sdk_is_not_imported_unless_asked() -> None:
    code = (
        "import sys; from coterie.gateway.watching.spans import Spans; "
        "Spans.from_environment({}).request('a', []).end(); assert 'opentelemetry' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize(
    ("environ", "kind"),
    [
        ({}, "none"),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://collector:4318"}, "otlp"),
        ({"OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": "http://collector:4318/v1/traces"}, "otlp"),
        ({"OTEL_TRACES_EXPORTER": "otlp"}, "otlp"),
        ({"OTEL_TRACES_EXPORTER": "console"}, "console"),
        ({"OTEL_TRACES_EXPORTER": "none", "OTEL_EXPORTER_OTLP_ENDPOINT": "http://collector:4318"}, "none"),
        ({"OTEL_SDK_DISABLED": "True", "OTEL_TRACES_EXPORTER": "otlp"}, "none"),
    ],
)
def test_the_standard_variables_decide(environ: dict[str, str], kind: str) -> None:
    assert exporter_kind(environ) == kind


def test_what_is_not_there_is_refused() -> None:
    with pytest.raises(ConfigError, match="OTEL_TRACES_EXPORTER='zipkin' must be one of otlp, console, none"):
        Spans.from_environment({"OTEL_TRACES_EXPORTER": "zipkin"})
    with pytest.raises(ConfigError, match="OTEL_EXPORTER_OTLP_PROTOCOL='grpc' must be 'http/protobuf'"):
        Spans.from_environment({"OTEL_TRACES_EXPORTER": "otlp", "OTEL_EXPORTER_OTLP_PROTOCOL": "grpc"})


sdk = pytest.importorskip("opentelemetry.sdk.trace", reason="spans need coterie[telemetry]")

from opentelemetry.sdk.trace import TracerProvider  # noqa: E402
from opentelemetry.sdk.trace.export import SimpleSpanProcessor  # noqa: E402
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter  # noqa: E402


@pytest.fixture
def memory() -> InMemorySpanExporter:
    return InMemorySpanExporter()


@pytest.fixture
def spans(memory: InMemorySpanExporter) -> Spans:
    provider = TracerProvider(shutdown_on_exit=False)
    provider.add_span_processor(SimpleSpanProcessor(memory))
    return Spans(provider)


def test_a_request_is_a_tree_in_the_clients_trace(spans: Spans, memory: InMemorySpanExporter) -> None:
    request = spans.request("POST /v1/chat/completions", CLIENT)
    decode = request.child("decode")
    decode.note(pool="decode", worker="w1", reason="cheapest", cached_tokens=64, prompt_tokens=100, fallback=None)
    sent = decode.outgoing(CLIENT)
    decode.end()
    request.note(status=200, output_tokens=7, outcome="ok")
    request.end()
    inner, outer = memory.get_finished_spans()
    assert (outer.name, inner.name) == ("POST /v1/chat/completions", "decode")
    assert outer.parent is not None
    assert inner.parent is not None
    assert f"{outer.parent.span_id:016x}" == PARENT
    assert inner.parent.span_id == outer.context.span_id
    assert f"{outer.context.trace_id:032x}" == f"{inner.context.trace_id:032x}" == TRACE
    assert dict(inner.attributes or {}) == {
        "coterie.pool": "decode",
        "coterie.worker": "w1",
        "coterie.reason": "cheapest",
        "coterie.cached_tokens": 64,
        "gen_ai.usage.input_tokens": 100,
    }
    assert sent[:2] == [(b"host", b"gateway"), (b"x-request-id", b"7")]
    assert dict(sent[2:]) == {
        b"traceparent": f"00-{TRACE}-{inner.context.span_id:016x}-01".encode(),
        b"tracestate": b"vendor=1",
    }


@pytest.mark.parametrize(
    "headers",
    [
        [],
        [(b"traceparent", b"junk")],
        [(b"traceparent", b"\xff" * 55)],
        [(b"traceparent", b"00-" + b"0" * 32 + b"-" + b"0" * 16 + b"-01")],
        [CLIENT[1], CLIENT[1]],
    ],
)
def test_without_a_valid_trace_one_begins(headers: Headers, spans: Spans, memory: InMemorySpanExporter) -> None:
    span = spans.request("GET /v1/models", headers)
    assert len(dict(span.outgoing(headers))[b"traceparent"]) == 55
    assert len(span.outgoing(headers)) == 1
    span.end()
    assert memory.get_finished_spans()[0].parent is None


def test_what_the_client_does_not_sample_is_passed_on_so(spans: Spans, memory: InMemorySpanExporter) -> None:
    unsampled: Headers = [(b"traceparent", f"00-{TRACE}-{PARENT}-00".encode()), (b"tracestate", b"vendor=1")]
    span = spans.request("POST /v1/completions", unsampled)
    sent = dict(span.child("decode").outgoing(unsampled))
    span.note(pool="decode")
    span.end("timeout")
    assert not span.recording
    assert (sent[b"traceparent"][:36], sent[b"traceparent"][-3:]) == (f"00-{TRACE}-".encode(), b"-00")
    assert sent[b"tracestate"] == b"vendor=1"
    assert memory.get_finished_spans() == ()


def test_a_problem_marks_the_span(spans: Spans, memory: InMemorySpanExporter) -> None:
    spans.request("POST /v1/completions", []).end("timeout")
    status = memory.get_finished_spans()[0].status
    assert (status.status_code.name, status.description) == ("ERROR", "timeout")


def test_attributes_are_those_listed(spans: Spans) -> None:
    with pytest.raises(KeyError):
        spans.request("POST /v1/completions", []).note(prompt="secret")  # type: ignore[call-arg]
    assert not {"prompt", "messages", "text", "authorization"} & set(ATTRIBUTES)


@pytest.fixture
def collector() -> Iterator[tuple[str, list[bytes]]]:
    """An HTTP server that takes what exporters post, as an OpenTelemetry collector does."""
    bodies: list[bytes] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            bodies.append(self.rfile.read(int(self.headers["content-length"])))
            self.send_response(200)
            self.end_headers()

        def log_message(self, format: str, *args: object) -> None:
            pass

    server = HTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}", bodies
    server.shutdown()
    thread.join()
    server.server_close()


def test_a_collector_gets_the_spans(collector: tuple[str, list[bytes]], monkeypatch: pytest.MonkeyPatch) -> None:
    trace_service = pytest.importorskip("opentelemetry.proto.collector.trace.v1.trace_service_pb2")
    url, bodies = collector
    environ = {"OTEL_EXPORTER_OTLP_ENDPOINT": url, "OTEL_EXPORTER_OTLP_COMPRESSION": "none"}
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    spans = Spans.from_environment(environ)
    assert spans.tracer is not None
    spans.request("POST /v1/completions", CLIENT).end()
    spans.close(timeout_s=60)
    (body,) = bodies
    (resource,) = trace_service.ExportTraceServiceRequest.FromString(body).resource_spans
    assert [one.value.string_value for one in resource.resource.attributes if one.key == "service.name"] == [
        "coterie-gateway"
    ]
    assert resource.scope_spans[0].spans[0].name == "POST /v1/completions"
    assert spans.request("POST /v1/completions", CLIENT) is NO_SPAN, "closed"
