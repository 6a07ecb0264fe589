"""Counters, gauges and histograms that cost a fraction of a microsecond.

The Prometheus client's own instruments take a lock for each value (an observation takes 1.5 µs; 0.3 µs here) and cannot
read totals that other objects keep. These are not thread-safe: they belong to the event loop's thread.

The number of series is bounded. A label with a fixed list of values counts any other value as ``other``. A label with
free values (worker, pool) does so once its metric has `MAX_SERIES` series.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate, product
from typing import Any, ClassVar

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily

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
            labels = self._series(labels)
        counts[labels][bisect_left(self.bounds, value)] += 1
        self._sums[labels] += value

    def forget(self, label: str, value: str) -> None:
        self.labels.drop(self._counts, label, value)
        self.labels.drop(self._sums, label, value)

    def count(self, *labels: str) -> int:
        return sum(self._counts.get(labels, ()))

    def collect(self) -> HistogramMetricFamily:
        family = HistogramMetricFamily(self.name, self.help, labels=self.labels.names)
        bounds = [*(str(float(bound)) for bound in self.bounds), "+Inf"]
        for key, counts in self._counts.items():
            family.add_metric(key, list(zip(bounds, accumulate(counts), strict=True)), self._sums[key])
        return family

    def _series(self, labels: tuple[str, ...]) -> tuple[str, ...]:
        series = self.labels.bounded(labels, len(self._counts))
        if series not in self._counts:
            self._counts[series] = [0] * (len(self.bounds) + 1)
            self._sums[series] = 0.0
        return series
