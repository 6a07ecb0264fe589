"""Counters of a worker, and their Prometheus text. Labels come from short fixed lists: no request, no expert."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import NamedTuple

PREFIX = "coterie_worker_"


class Metric(NamedTuple):
    kind: str
    label: str | None
    values: tuple[str, ...]
    help: str


METRICS: dict[str, Metric] = {
    "requests_total": Metric("counter", "outcome", ("stop", "length", "abort", "error"), "Requests that ended"),
    "rejected_total": Metric("counter", None, (), "Requests refused: bad input, or draining"),
    "running": Metric("gauge", None, (), "Requests in the batch"),
    "waiting": Metric("gauge", None, (), "Requests not in the batch yet"),
    "prompt_tokens_total": Metric(
        "counter", "source", ("computed", "prefix_cache", "transfer"), "Prompt tokens by where their KV came from"
    ),
    "generated_tokens_total": Metric("counter", None, (), "Tokens generated"),
    "steps_total": Metric("counter", None, (), "Forward passes"),
    "step_rows_total": Metric("counter", "phase", ("prefill", "decode"), "Tokens computed, recomputed ones too"),
    "step_seconds_total": Metric("counter", None, (), "Time in forward passes"),
    "step_failures_total": Metric("counter", None, (), "Forward passes that raised; their requests ended in error"),
    "preemptions_total": Metric("counter", None, (), "Requests put back to wait because blocks ran out"),
    "kv_blocks": Metric("gauge", "state", ("used", "cached", "empty"), "KV blocks: used + cached + empty is constant"),
    "prefix_blocks_total": Metric("counter", "result", ("hit", "miss"), "Full prompt blocks looked up in the cache"),
    "distinct_experts_sum": Metric(
        "counter",
        "over_layers",
        ("min", "mean", "max"),
        "Distinct experts of the decode rows of a step; divide by distinct_experts_steps_total",
    ),
    "distinct_experts_steps_total": Metric("counter", None, (), "Steps with decode rows"),
    "kv_staged": Metric("gauge", None, (), "Prefilled requests whose KV waits to be fetched"),
    "kv_staged_total": Metric("counter", None, (), "Prefilled requests whose KV was kept for another worker"),
    "kv_released_total": Metric(
        "counter", "why", ("fetched", "dropped", "expired", "evicted", "shutdown"), "Kept KV that was let go"
    ),
    "kv_fetch_total": Metric(
        "counter",
        "outcome",
        ("ok", "unreachable", "missing", "damaged", "mismatch", "cancelled"),
        "KV asked of prefill workers; what is not ok is computed here, unless the client is gone (cancelled)",
    ),
    "kv_fetch_bytes_total": Metric("counter", None, (), "Bytes of KV fetched"),
    "events_published_total": Metric("counter", "stream", ("kv", "experts"), "Messages published"),
    "events_dropped_total": Metric(
        "counter", "stream", ("kv", "experts"), "Times a subscriber's queue was full and it missed messages"
    ),
}


class Metrics:
    """Counts by name and label value; a wrong one raises."""

    def __init__(self) -> None:
        self._values: Counter[tuple[str, str]] = Counter()

    def add(self, name: str, label: str = "", by: float = 1) -> None:
        self.set(name, label, self._values[name, label] + by)

    def set(self, name: str, label: str, value: float) -> None:
        metric = METRICS[name]
        if label not in metric.values and (metric.label or label):
            raise KeyError(f"{name} has no {metric.label}={label!r}")
        self._values[name, label] = value  # type: ignore[assignment]

    def get(self, name: str, label: str = "") -> float:
        return self._values[name, label]

    def render(self, constant: Mapping[str, str]) -> str:
        """Prometheus text format 0.0.4; `constant` labels are on every series."""
        lines = []
        for name, metric in METRICS.items():
            lines.append(f"# HELP {PREFIX}{name} {metric.help}")
            lines.append(f"# TYPE {PREFIX}{name} {metric.kind}")
            for value in metric.values or ("",):
                labels = [*constant.items(), *([(metric.label, value)] if metric.label else [])]
                lines.append(f"{PREFIX}{name}{_labels(labels)} {self._values[name, value]:.15g}")
        return "\n".join(lines) + "\n"


def _labels(pairs: Iterable[tuple[str, str]]) -> str:
    def quote(text: str) -> str:
        return text.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")

    inside = ",".join(f'{name}="{quote(value)}"' for name, value in pairs)
    return f"{{{inside}}}" if inside else ""
