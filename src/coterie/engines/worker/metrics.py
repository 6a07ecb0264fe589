"""Metrics of a worker, in a separate Prometheus registry.

Label values come from short fixed lists, never from requests or experts. Values are plain numbers, collected on
scrape: some are totals kept by other objects, and a prometheus_client Counter cannot be set to a value.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any, Literal, NamedTuple

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric, SummaryMetricFamily
from prometheus_client.registry import Collector

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
PREFIX = "coterie_worker_"


class WorkerMetric(NamedTuple):
    kind: Literal["counter", "gauge", "sum"]
    """Type of the metric; a `sum` is exported as a summary, with the count of the added values."""
    label: str | None
    values: tuple[str, ...]
    help: str


METRICS: dict[str, WorkerMetric] = {
    "requests_total": WorkerMetric("counter", "outcome", ("stop", "length", "abort", "error"), "Requests that ended"),
    "rejected_total": WorkerMetric("counter", None, (), "Requests refused: bad input, or draining"),
    "http_problems_total": WorkerMetric(
        "counter",
        "kind",
        ("refused", "malformed", "timeout", "disconnect", "error"),
        "Connections refused, requests that were malformed or late, clients that left, handlers that failed",
    ),
    "running": WorkerMetric("gauge", None, (), "Requests in the batch"),
    "waiting": WorkerMetric("gauge", None, (), "Requests not in the batch yet"),
    "prompt_tokens_total": WorkerMetric(
        "counter", "source", ("computed", "prefix_cache", "transfer"), "Prompt tokens by where their KV came from"
    ),
    "generated_tokens_total": WorkerMetric("counter", None, (), "Tokens generated"),
    "steps_total": WorkerMetric("counter", None, (), "Forward passes"),
    "step_rows_total": WorkerMetric("counter", "phase", ("prefill", "decode"), "Tokens computed, recomputed ones too"),
    "step_seconds_total": WorkerMetric("counter", None, (), "Time in forward passes"),
    "step_failures_total": WorkerMetric(
        "counter", None, (), "Forward passes that raised; their requests ended in error"
    ),
    "preemptions_total": WorkerMetric("counter", None, (), "Requests put back to wait because blocks ran out"),
    "kv_blocks": WorkerMetric(
        "gauge", "state", ("used", "cached", "empty"), "KV blocks: used + cached + empty is constant"
    ),
    "prefix_blocks_total": WorkerMetric(
        "counter", "result", ("hit", "miss"), "Full prompt blocks looked up in the cache"
    ),
    "distinct_experts_sum": WorkerMetric(
        "sum",
        "over_layers",
        ("min", "mean", "max"),
        "Distinct experts of the decode rows of a step; divide by distinct_experts_steps_total",
    ),
    "distinct_experts_steps_total": WorkerMetric("counter", None, (), "Steps with decode rows"),
    "kv_staged": WorkerMetric("gauge", None, (), "Prefilled requests whose KV waits to be fetched"),
    "kv_staged_total": WorkerMetric("counter", None, (), "Prefilled requests whose KV was kept for another worker"),
    "kv_released_total": WorkerMetric(
        "counter", "why", ("fetched", "dropped", "expired", "evicted", "shutdown"), "Kept KV that was let go"
    ),
    "kv_fetch_total": WorkerMetric(
        "counter",
        "outcome",
        ("ok", "refused", "unreachable", "missing", "damaged", "mismatch", "cancelled"),
        "KV offered by prefill workers; what is not ok is computed here, unless the client is gone (cancelled)",
    ),
    "kv_fetch_bytes_total": WorkerMetric("counter", None, (), "Bytes of KV fetched"),
    "events_published_total": WorkerMetric("counter", "stream", ("kv", "experts"), "Messages published"),
    "events_dropped_total": WorkerMetric(
        "counter", "stream", ("kv", "experts"), "Times a subscriber's queue was full and it missed messages"
    ),
}


FAMILIES: dict[str, tuple[Any, str]] = {
    "counter": (CounterMetricFamily, "_total"),
    "sum": (SummaryMetricFamily, "_sum"),
    "gauge": (GaugeMetricFamily, ""),
}
"""Class of each kind of metric, and the suffix that it appends to the name itself."""
COUNT_OF = {"distinct_experts_sum": "distinct_experts_steps_total"}
"""Maps a sum to the counter of the values added to it."""


class WorkerMetrics(Collector):
    """Values by metric name and label value; unknown names and labels raise. Every series has the `constant` labels."""

    def __init__(self, constant: Mapping[str, str]) -> None:
        self._constant = dict(constant)
        self._values: Counter[tuple[str, str]] = Counter()
        self._registry = CollectorRegistry()
        self._registry.register(self)

    def add(self, name: str, label: str = "", by: float = 1) -> None:
        self.set(name, label, self._values[name, label] + by)

    def set(self, name: str, label: str, value: float) -> None:
        metric = METRICS[name]
        if label not in metric.values and (metric.label or label):
            raise KeyError(f"{name} has no {metric.label}={label!r}")
        self._values[name, label] = value  # type: ignore[assignment]

    def get(self, name: str, label: str = "") -> float:
        return self._values[name, label]

    def collect(self) -> Iterator[Metric]:
        for name, metric in METRICS.items():
            kind, suffix = FAMILIES[metric.kind]
            labels = [*self._constant, *([metric.label] if metric.label else [])]
            family = kind(PREFIX + name.removesuffix(suffix), metric.help, labels=labels)
            for label in metric.values or ("",):
                series = [*self._constant.values(), *([label] if metric.label else [])]
                count = [self._values[COUNT_OF[name], ""]] if metric.kind == "sum" else []
                family.add_metric(series, *count, self._values[name, label])
            yield family

    def render(self) -> bytes:
        """Return all metrics in the Prometheus text format 0.0.4."""
        return generate_latest(self._registry)
