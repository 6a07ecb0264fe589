"""Metrics of expert load, in vLLM's own Prometheus endpoint.

Series are labelled by layer at most, never by expert: a model of 58 layers x 256 experts would have 14,848 series per
metric. A layer's imbalance summarises its experts in one number.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats

COUNTERS = {
    "steps": "Steps whose experts were captured",
    "tokens": "Tokens whose experts were captured",
    "footprints": "Footprints put into answers",
    "footprints_incomplete": "Footprints of requests with tokens whose experts this worker never saw",
    "footprints_missing": "Handoffs that left without a footprint",
    "requests": "Finished requests whose experts were published",
    "requests_missing": "Finished requests that were not, because their last step was not written yet",
    "events_published": "Expert events published",
    "events_dropped": "Expert events that found the queue full, and times a subscriber was found full",
    "events_failed": "Expert events that could not be built",
    "errors": "Failures inside the plugin; serving went on",
}
GAUGES = {
    "capture_on": "1 while experts are captured, 0 while they are not",
    "store_bytes": "Memory of the position store",
    "balancedness": "Mean over layers of mean / max expert load in the last interval",
    "distinct_experts": "Distinct experts of a layer in a step, mean over layers and steps of the last interval",
}
MAX_LAYERS = 256


@dataclass
class CoterieStats(KVConnectorStats):
    """Metrics from the engine core to the API server: counters since the last report, and current gauges."""

    def reset(self) -> None:
        self.data.clear()

    def aggregate(self, other: KVConnectorStats) -> KVConnectorStats:
        counters = Counter(self.data.get("counters", {}))
        counters.update(other.data.get("counters", {}))
        self.data.update({**other.data, "counters": dict(counters)})
        return self

    def reduce(self) -> dict[str, int | float]:
        """Return the values for vLLM's log line."""
        return {f"coterie_{name}": value for name, value in self.data.get("counters", {}).items() if value}

    def is_empty(self) -> bool:
        return not self.data


class CoterieMetrics(KVConnectorPromMetrics):
    """Prometheus series, created once; `observe` updates them."""

    def __init__(self, vllm_config: Any, metric_types: Any, labelnames: list[str], labelvalues: Any) -> None:
        super().__init__(vllm_config, metric_types, labelnames, labelvalues)
        self._counters, self._gauges = (
            {name: kind(name=f"coterie_{name}", documentation=text, labelnames=labelnames) for name, text in texts}
            for kind, texts in ((self._counter_cls, COUNTERS.items()), (self._gauge_cls, GAUGES.items()))
        )
        for labels in labelvalues.values():  # so that an unused counter reads 0 instead of being absent
            for counter in self._counters.values():
                counter.labels(*labels)
        self._imbalance = self._gauge_cls(
            name="coterie_layer_imbalance",
            documentation="Max / mean expert load of a layer in the last interval",
            labelnames=[*labelnames, "layer"],
        )

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        labels = self.per_engine_labelvalues[engine_idx]
        for name, value in transfer_stats_data.get("counters", {}).items():
            if value > 0:
                self._counters[name].labels(*labels).inc(value)
        for name, value in transfer_stats_data.get("gauges", {}).items():
            self._gauges[name].labels(*labels).set(value)
        for layer, value in transfer_stats_data.get("layers", {}).items():
            self._imbalance.labels(*labels, str(layer)).set(value)


def interval_gauges(
    load: NDArray[np.integer], layer_ids: tuple[int, ...], distinct: int, steps: int
) -> tuple[dict[str, float], dict[int, float]]:
    """Return the gauges of an interval's load [layer, expert], and each layer's max / mean."""
    mean = load.mean(axis=1)
    busy = mean > 0
    if not busy.any():
        return {}, {}
    imbalance = load.max(axis=1)[busy] / mean[busy]
    gauges = {"balancedness": float((1 / imbalance).mean())}
    if steps:
        gauges["distinct_experts"] = distinct / steps / len(load)
    return gauges, dict(zip(np.asarray(layer_ids)[busy].tolist()[:MAX_LAYERS], imbalance.tolist(), strict=False))
