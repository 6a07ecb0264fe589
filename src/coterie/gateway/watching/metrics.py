"""Prometheus metrics of the gateway, in a registry of their own.

One attribute is one metric: ``metrics.requests.inc("/v1/completions", "ok")``, ``metrics.ttft_seconds.observe(0.12)``.
No label contains a request, a prompt, an expert or a caller. The series of a worker that leaves are removed
(:meth:`Metrics.forget_worker`), and unknown paths share one label value.

Values that another object keeps anyway are read at collection, at no cost per request::

    metrics.worker_running.read = lambda: {(id,): running for id, running in …}

The instruments cost a fraction of a microsecond. The Prometheus client's own take a lock for each value (an observation
takes 1.5 µs; 0.3 µs here) and cannot read totals that other objects keep. These are not thread-safe: they belong to the
event loop's thread. The number of series is bounded. A label with a fixed list of values counts any other value as
``other``. A label with free values (worker, pool) does so once its metric has `MAX_SERIES` series.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import accumulate, product
from typing import Any, ClassVar

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from coterie.control.base import KINDS

PREFIX = "coterie_gateway_"
OTHER = "other"
MAX_SERIES = 2048

Values = Mapping[tuple[str, ...], float]
"""Label values → value. A metric without labels has one value, at the empty tuple."""
Read = Callable[
    [], float | Values | Mapping[tuple[()], float] | Mapping[tuple[str], float] | Mapping[tuple[str, str], float]
]
"""Function that returns the value of a metric without labels, or all values. Mapping's key type is invariant, so each
number of labels is listed."""


class Labels:
    """Names of a metric's labels, and their allowed values."""

    def __init__(self, values: Mapping[str, Sequence[str] | None]) -> None:
        """`values` maps each label's name to its allowed values; None for any."""
        self.names = tuple(values)
        self._listed = [None if known is None else frozenset(known) for known in values.values()]
        self.known: list[tuple[str, ...]] = []
        """Series that exist from the start with value 0, so that a Prometheus rate sees their first event."""
        if None not in values.values():
            self.known = list(product(*(known for known in values.values() if known is not None)))

    def bounded(self, given: tuple[str, ...], series: int) -> tuple[str, ...]:
        """Return the series of a new combination of label values; `series` is the number of existing series."""
        if len(given) != len(self.names):
            raise TypeError(f"{len(given)} label values {given}; the metric has {len(self.names)}: {self.names}")
        full = series >= MAX_SERIES
        return tuple(
            OTHER if (full if listed is None else value not in listed) else value
            for value, listed in zip(given, self._listed, strict=True)
        )

    def drop(self, series: dict[tuple[str, ...], Any], name: str, value: str) -> None:
        """Remove the series in which label `name` has this value."""
        if name in self.names:
            place = self.names.index(name)
            for key in [key for key in series if key[place] == value]:
                del series[key]


class _Number:
    __slots__ = ("_values", "help", "labels", "name", "read")
    family: ClassVar[type[CounterMetricFamily | GaugeMetricFamily]]

    def __init__(self, name: str, help: str, **labels: Sequence[str] | None) -> None:
        """`labels` maps the name of each label to its allowed values; None for any."""
        self.name, self.help, self.labels = PREFIX + name, help, Labels(labels)
        self._values: dict[tuple[str, ...], float] = dict.fromkeys(self.labels.known, 0.0)
        self.read: Read | None = None
        """Function that returns all values at collection, in place of the stored ones; None to use those."""

    def forget(self, label: str, value: str) -> None:
        self.labels.drop(self._values, label, value)

    def values(self) -> Values:
        if self.read is None:
            return self._values
        values: dict[tuple[str, ...], float] = dict.fromkeys(self.labels.known, 0.0)
        read = self.read()
        for key, value in (read if isinstance(read, Mapping) else {(): read}).items():
            series = self.labels.bounded(key, len(values))
            values[series] = values.get(series, 0.0) + value
        return values

    def collect(self) -> CounterMetricFamily | GaugeMetricFamily:
        family = self.family(self.name.removesuffix("_total"), self.help, labels=self.labels.names)
        for key, value in self.values().items():
            family.add_metric(key, value)
        return family


class Counter(_Number):
    """A monotonically increasing total."""

    __slots__ = ()
    kind, family = "counter", CounterMetricFamily

    def inc(self, *labels: str, by: float = 1.0) -> None:
        values = self._values
        if labels in values:
            values[labels] += by
        else:
            series = self.labels.bounded(labels, len(values))
            values[series] = values.get(series, 0.0) + by


class Gauge(_Number):
    """A current value, which may rise and fall."""

    __slots__ = ()
    kind, family = "gauge", GaugeMetricFamily

    def set(self, value: float, *labels: str) -> None:
        values = self._values
        values[labels if labels in values else self.labels.bounded(labels, len(values))] = value


class Histogram:
    """Counts of values in buckets with upper bounds."""

    __slots__ = ("_counts", "_sums", "bounds", "help", "labels", "name")
    kind = "histogram"

    def __init__(self, name: str, help: str, bounds: Sequence[float], **labels: Sequence[str] | None) -> None:
        """`labels` maps the name of each label to its allowed values; None for any."""
        self.name, self.help, self.labels, self.bounds = PREFIX + name, help, Labels(labels), list(bounds)
        self._counts = {key: [0] * (len(self.bounds) + 1) for key in self.labels.known}
        self._sums: dict[tuple[str, ...], float] = dict.fromkeys(self.labels.known, 0.0)

    def observe(self, value: float, *labels: str) -> None:
        """Count a value. Negative and non-finite values are ignored: one would spoil the sum for good."""
        if not 0.0 <= value < math.inf:
            return
        counts = self._counts
        if labels not in counts:
            labels = self.labels.bounded(labels, len(counts))
            counts.setdefault(labels, [0] * (len(self.bounds) + 1))
            self._sums.setdefault(labels, 0.0)
        counts[labels][bisect_left(self.bounds, value)] += 1
        self._sums[labels] += value

    def forget(self, label: str, value: str) -> None:
        self.labels.drop(self._counts, label, value)
        self.labels.drop(self._sums, label, value)

    def collect(self) -> HistogramMetricFamily:
        family = HistogramMetricFamily(self.name, self.help, labels=self.labels.names)
        bounds = [*(str(float(bound)) for bound in self.bounds), "+Inf"]
        for key, counts in self._counts.items():
            family.add_metric(key, list(zip(bounds, accumulate(counts), strict=True)), self._sums[key])
        return family


CONTENT_TYPE = b"text/plain; version=0.0.4; charset=utf-8"

OUTCOMES = ("ok", "refused", "invalid", "failed", "broken", "cancelled", "drained", OTHER)
"""Outcomes of a request, in order: answered; refused by a limit (401, 403, 429, 503); invalid request (other 4xx);
failed before the first byte (5xx); broken off after it; cancelled by the client; cut by the end of the drain."""
REJECTED = (
    "key",
    "rate",
    "queue_full",
    "queue_deadline",
    "too_large",
    "encoding",
    "malformed",
    "slow_client",
    "connections",
    "draining",
    "no_worker",
    OTHER,
)
FAILURES = ("connect", "reset", "timeout", "protocol", "too_large", "incomplete", "unhealthy", "status_5xx", OTHER)
REPORTS = ("ok", *FAILURES[:-2], "status", "unknown", "malformed", "impossible", OTHER)
"""Readings of a worker's metrics, by result: how the exchange failed, a status other than 200, none of the known names,
a line that is no metric, a value that cannot be."""
IGNORED = ("other_shape", "malformed", "nonsense", "not_sent", "doubled", "no_decode", "unmatched", "loop", OTHER)
BREAKER_STATES = {"closed": 0.0, "half_open": 1.0, "open": 2.0}


class Metrics(Collector):
    """All metrics of one gateway."""

    def __init__(self, version: str = "") -> None:
        self.before_reading: Callable[[], None] = lambda: None
        """Function called before collection, to count events that are still buffered elsewhere."""
        self.requests = Counter(
            "requests_total",
            "Requests that ended",
            path=(
                *("/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/embeddings", "/v1/models"),
                *("/tokenize", "/detokenize", OTHER),
            ),
            outcome=OUTCOMES,
        )
        self.rejected = Counter("rejected_total", "Requests the gateway refused, by limit", reason=REJECTED)
        self.in_flight = Gauge("in_flight", "Requests begun and not ended")
        self.request_seconds = Histogram(
            "request_seconds",
            "From a request's head to its answer's end",
            (5e-3, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0),
        )
        self.ttft_seconds = Histogram(
            "ttft_seconds",
            "From a request's head to its first token",
            (1e-3, 2e-3, 5e-3, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 20.0, 60.0),
        )
        self.tpot_seconds = Histogram(
            "tpot_seconds",
            "Mean time between a request's later tokens",
            (1e-4, 2e-4, 5e-4, 1e-3, 2e-3, 5e-3, 0.01, 0.02, 0.03, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0),
        )
        self.prompt_tokens = Counter("prompt_tokens_total", "Prompt tokens, as workers report them")
        self.output_tokens = Counter("output_tokens_total", "Tokens generated, as workers report them")

        self.decision_seconds = Histogram(
            "decision_seconds",
            "Time to choose a worker",
            (1e-5, 2e-5, 5e-5, 1e-4, 2e-4, 5e-4, 1e-3, 2e-3, 5e-3, 1e-2),
            pool=None,
        )
        self.routed = Counter("routed_total", "Requests sent to a worker, retries too", pool=None, worker=None)
        self.fallbacks = Counter(
            "fallbacks_total", "Requests sent to the shortest queue because the router failed", reason=None
        )
        self.retries = Counter("retries_total", "Requests sent to another worker before their first byte", pool=None)
        self.handoffs = Counter(
            "handoffs_total",
            "Requests of prefill and decode pairs, by handoff",
            outcome=("ok", "no_prefill", "prefill_failed", "refused", OTHER),
        )

        self.queue_length = Gauge("queue_length", "Requests that wait for a place in the fleet")
        self.queue_seconds = Histogram(
            "queue_seconds",
            "Wait for a place in the fleet",
            (1e-4, 1e-3, 5e-3, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0),
        )

        self.worker_running = Gauge("worker_running", "Requests sent to a worker and not ended", worker=None)
        self.worker_prefill_tokens = Gauge(
            "worker_prefill_tokens", "Prompt tokens sent to a worker and not computed yet", worker=None
        )
        self.worker_reported_requests = Gauge(
            "worker_reported_requests", "Requests at a worker, by its own metrics", worker=None
        )
        self.worker_others = Gauge(
            "worker_others", "Requests of other front ends at a worker that routing counts", worker=None
        )
        self.worker_kv_used = Gauge("worker_kv_used", "Share of KV blocks in use, by the worker's metrics", worker=None)
        self.worker_report_age = Gauge(
            "worker_report_age_seconds", "Age of the worker's metrics that routing uses", worker=None
        )
        self.worker_reports = Counter(
            "worker_reports_total", "Readings of a worker's metrics", worker=None, outcome=REPORTS
        )
        self.worker_places = Gauge("worker_places", "Requests that a worker may run at once", worker=None)
        self.worker_healthy = Gauge("worker_healthy", "1 if the worker's health checks pass", worker=None)
        self.worker_stream_connected = Gauge(
            "worker_stream_connected",
            "1 if an event stream of the worker has a connection",
            worker=None,
            stream=("kv_events", "expert_events"),
        )
        self.breaker_state = Gauge("breaker_state", "0: closed, 1: half open, 2: open, gets no requests", worker=None)
        self.worker_failures = Counter(
            "worker_failures_total", "Exchanges in which a worker failed", worker=None, kind=FAILURES
        )

        self.cached_tokens = Counter(
            "cached_tokens_total",
            "Prompt tokens in the chosen worker's cache: expected by the directory, reported by the worker",
            pool=("prefill", "decode", OTHER),
            source=("expected", "reported"),
        )
        self.predicted_experts = Histogram(
            "predicted_experts",
            "Distinct experts a layer in a request's footprint, mean over layers",
            (1, 2, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256),
        )
        self.distinct_experts = Gauge(
            "distinct_experts", "Distinct experts a layer expected of a step of the worker's requests", worker=None
        )
        self.footprints = Counter(
            "footprints_total",
            "Requests by where their footprint came from",
            source=("answer", "prefix", "predictor", "popularity", "none", "damaged", OTHER),
        )
        self.tokenise_seconds = Histogram(
            "tokenise_seconds",
            "Time to tokenise a prompt, here or by a worker; cached ones left out",
            (1e-5, 5e-5, 1e-4, 2e-4, 5e-4, 1e-3, 2e-3, 5e-3, 0.01, 0.02, 0.05, 0.1, 0.5, 1.0),
        )
        self.tokenised = Counter(
            "tokenised_total",
            "Prompts by how their token ids were found",
            outcome=(
                *("exact", "asked", "learned", "cached", "none", "late", "busy", "too_long"),
                *("unanswered", "failed", OTHER),
            ),
        )
        self.kv_events = Counter(
            "kv_events_total",
            "Batches of KV events from workers; blocks that were refused",
            outcome=("applied", "replayed", "gap", "malformed", "refused", OTHER),
        )
        self.kv_claims_believed = Gauge(
            "kv_claims_believed", "Share of the worker's cached tokens, by its KV events, that is believed", worker=None
        )

        self.switchback_change = Gauge(
            "switchback_change_percent",
            "Change by the decode router against the shortest queue, measured in turns, and the ends of its interval",
            measure=None,
            bound=None,
        )
        self.peers_present = Gauge("peers_present", "Other gateways whose requests routing counts")
        self.switchback_pairs = Gauge("switchback_pairs", "Pairs of blocks in which it was measured")
        self.switchback_left = Gauge(
            "switchback_left", "1 while the shortest queue routes because the router was worse"
        )
        self.control_events = Counter("control_events_total", "Decisions of the control loop", kind=(*KINDS, OTHER))
        self.control_refits = Counter(
            "control_refits_total", "Fits that the control loop made", outcome=("taken", "kept", "failed")
        )
        self.control_swaps = Counter("control_swaps_total", "Fits of the control loop that were put in force")
        self.control_fit_seconds = Gauge("control_fit_seconds", "Time that the last fit of the control loop took")
        self.control_ignored = Counter(
            "control_ignored_total", "Expert events that the control loop left out", reason=IGNORED
        )
        self.control_stream = Counter(
            "control_stream_total",
            "Messages of the workers' expert-event streams, those that were lost too",
            kind=("messages", "malformed", "lost", "doubled", "restarts", "unreachable", OTHER),
        )
        self.control_restarts = Counter(
            "control_restarts_total", "Times that the control loop's process had to be started again"
        )

        self.connections = Gauge("connections", "Open client connections")
        self.connections_accepted = Counter("connections_accepted_total", "Client connections accepted")
        self.connections_refused = Counter("connections_refused_total", "Client connections past the limit")
        self.connection_timeouts = Counter("connection_timeouts_total", "Clients that were too slow", kind=None)
        self.malformed = Counter("malformed_total", "Requests that are not valid HTTP")
        self.disconnects = Counter("disconnects_total", "Clients that left before their answer's end")
        self.errors = Counter("errors_total", "Unexpected exceptions, by place; each is a fault to report", kind=None)
        self.tasks = Gauge("tasks", "Tasks of the event loop: requests, health checks")
        self.reloads = Counter("reloads_total", "Reloads of the configuration", outcome=("ok", "rejected"))
        self.build = Gauge("build_info", "1, with the version of Coterie", version=None)
        self.build.set(1.0, version)
        self.all = [metric for metric in vars(self).values() if isinstance(metric, Counter | Gauge | Histogram)]
        """All metrics, in order of definition."""
        self._registry = CollectorRegistry()
        self._registry.register(self)

    def forget_worker(self, worker: str) -> None:
        """Remove the series of a worker that left."""
        for metric in self.all:
            metric.forget("worker", worker)

    def collect(self) -> Iterator[Metric]:
        self.before_reading()
        for metric in self.all:
            try:
                family = metric.collect()
            except Exception as error:  # a failing source must not hide the other metrics
                self.errors.inc(type(error).__name__)
                continue
            yield family

    def render(self) -> bytes:
        """Return all metrics in Prometheus text format 0.0.4."""
        return generate_latest(self._registry)
