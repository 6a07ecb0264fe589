"""OpenTelemetry spans of requests, if enabled; otherwise all calls do nothing.

The standard variables enable them: ``OTEL_EXPORTER_OTLP_ENDPOINT`` (or its ``…_TRACES_…`` form), or
``OTEL_TRACES_EXPORTER`` (``otlp``, ``console``, ``none``). Sampling, resource and batching follow further ``OTEL_``
variables, which the SDK reads. Install the SDK with ``pip install coterie[telemetry]``.

A client's trace (W3C ``traceparent``) is continued; workers get the gateway's span as parent of their spans. Without
spans the client's header is passed on unchanged. Attributes are those of :meth:`Span.note`: no prompt, no header, no
key.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from coterie.errors import UnavailableError, check, check_one_of

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import SpanExporter

Headers = list[tuple[bytes, bytes]]

TRACE_HEADERS = (b"traceparent", b"tracestate")
EXPORTERS = ("otlp", "console", "none")
MAX_REASON = 200


class Span:
    """Span of one operation. This base class does nothing; its subclasses record or pass on the trace."""

    __slots__ = ()
    recording = False

    def note(
        self,
        *,
        pool: str | None = None,
        worker: str | None = None,
        reason: str | None = None,
        fallback: str | None = None,
        cached_tokens: int | None = None,
        prompt_tokens: int | None = None,
        output_tokens: int | None = None,
        footprint: str | None = None,
        status: int | None = None,
        retries: int | None = None,
        outcome: str | None = None,
    ) -> None:
        """Set attributes; those not given stay unchanged."""

    def child(self, name: str) -> Span:  # noqa: ARG002 (recorded spans use the name)
        """Begin a child span: the exchange with one worker."""
        return self

    def outgoing(self, headers: Headers) -> Headers:
        """Return the headers for a worker, with this span's trace context in place of the client's."""
        return headers

    def end(self, problem: str | None = None) -> None:
        """End the span; `problem` is a kind of failure ("timeout"), without text of the request."""


NO_SPAN = Span()


class Spans:
    """Factory of request spans; without a provider its spans do nothing."""

    def __init__(self, provider: TracerProvider | None = None) -> None:
        self._provider = provider
        self.tracer: Any = None if provider is None else provider.get_tracer("coterie.gateway")
        """Tracer of the spans; None if none are made."""

    @classmethod
    def from_environment(cls, environ: Mapping[str, str] = os.environ) -> Spans:
        """Make a factory as the OTEL_ variables configure; without them its spans do nothing."""
        kind = exporter_kind(environ)
        return cls() if kind == "none" else cls(_provider(kind, environ))

    def request(self, name: str, headers: Headers) -> Span:
        """Begin the span of a client's request, such as ``POST /v1/completions``, as part of the client's trace."""
        if self.tracer is None:
            return NO_SPAN
        from opentelemetry.trace import SpanKind

        started = self.tracer.start_span(name, context=_context_of(headers), kind=SpanKind.SERVER)
        return _Recorded(self.tracer, started) if started.is_recording() else _Unsampled(started)

    def close(self, timeout_s: float = 5.0) -> None:
        """Export the remaining spans. Give up after `timeout_s`: a stalled collector must not block the gateway."""
        if self._provider is not None:
            closing = threading.Thread(target=self._provider.shutdown, name="coterie-spans-close", daemon=True)
            closing.start()
            closing.join(timeout_s)
            self._provider = self.tracer = None


class _Unsampled(Span):
    """Span of a trace that the sampler dropped: only its context is passed on, so that workers drop it too."""

    __slots__ = ("_span",)

    def __init__(self, span: Any) -> None:
        self._span = span

    def outgoing(self, headers: Headers) -> Headers:
        # Formatted here because the SDK's propagator takes twice the time.
        context = self._span.get_span_context()
        parent = f"00-{context.trace_id:032x}-{context.span_id:016x}-{context.trace_flags:02x}"
        sent = [header for header in headers if header[0] not in TRACE_HEADERS]
        sent.append((b"traceparent", parent.encode()))
        if context.trace_state:
            sent.append((b"tracestate", context.trace_state.to_header().encode("latin-1")))
        return sent


class _Recorded(_Unsampled):
    __slots__ = ("_tracer",)
    recording = True

    def __init__(self, tracer: Any, span: Any) -> None:
        super().__init__(span)
        self._tracer = tracer

    def note(self, **values: Any) -> None:
        for name, value in values.items():
            if value is not None:
                self._span.set_attribute(ATTRIBUTES[name], value[:MAX_REASON] if isinstance(value, str) else value)

    def child(self, name: str) -> Span:
        from opentelemetry.trace import SpanKind, set_span_in_context

        context = set_span_in_context(self._span)
        return _Recorded(self._tracer, self._tracer.start_span(name, context=context, kind=SpanKind.CLIENT))

    def end(self, problem: str | None = None) -> None:
        if problem is not None:
            from opentelemetry.trace import Status, StatusCode

            self._span.set_status(Status(StatusCode.ERROR, problem[:MAX_REASON]))
        self._span.end()


ATTRIBUTES = {
    "pool": "coterie.pool",
    "worker": "coterie.worker",
    "reason": "coterie.reason",
    "fallback": "coterie.fallback",
    "cached_tokens": "coterie.cached_tokens",
    "prompt_tokens": "gen_ai.usage.input_tokens",
    "output_tokens": "gen_ai.usage.output_tokens",
    "footprint": "coterie.footprint",
    "status": "http.response.status_code",
    "retries": "coterie.retries",
    "outcome": "coterie.outcome",
}
"""Argument of :meth:`Span.note` → name of the attribute. No other attribute is ever set."""


def exporter_kind(environ: Mapping[str, str]) -> str:
    """Return the exporter that the variables select: otlp, console or none."""
    if environ.get("OTEL_SDK_DISABLED", "").strip().lower() == "true":
        return "none"
    endpoint = environ.get("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT") or environ.get("OTEL_EXPORTER_OTLP_ENDPOINT")
    kind = environ.get("OTEL_TRACES_EXPORTER", "").strip().lower() or ("otlp" if endpoint else "none")
    check_one_of(EXPORTERS, OTEL_TRACES_EXPORTER=kind)
    return kind


def _provider(kind: str, environ: Mapping[str, str]) -> TracerProvider:
    protocol = environ.get("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL") or environ.get("OTEL_EXPORTER_OTLP_PROTOCOL")
    check(
        kind != "otlp" or protocol in (None, "http/protobuf"),
        f"OTEL_EXPORTER_OTLP_PROTOCOL={protocol!r} must be 'http/protobuf'",
    )
    try:
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor, ConsoleSpanExporter
    except ImportError:
        raise UnavailableError("spans need the OpenTelemetry SDK: pip install 'coterie[telemetry]'") from None
    exporter: SpanExporter
    if kind == "console":
        exporter = ConsoleSpanExporter()
    else:
        try:
            from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        except ImportError:
            raise UnavailableError("OTEL_TRACES_EXPORTER=otlp needs pip install 'coterie[telemetry]'") from None
        exporter = OTLPSpanExporter()
    named = {} if environ.get("OTEL_SERVICE_NAME") else {"service.name": "coterie-gateway"}
    provider = TracerProvider(resource=Resource.create(named), shutdown_on_exit=False)
    provider.add_span_processor(BatchSpanProcessor(exporter))
    return provider


def _context_of(headers: Headers) -> Any:
    """Return the trace context in a client's headers; an empty one if it is missing or invalid."""
    from opentelemetry.context import Context
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

    parents = [value for name, value in headers if name == b"traceparent"]
    if len(parents) != 1:
        return Context()
    states = b",".join(value for name, value in headers if name == b"tracestate")
    carrier = {"traceparent": parents[0].decode("latin-1"), "tracestate": states.decode("latin-1")}
    return TraceContextTextMapPropagator().extract(carrier, Context())
