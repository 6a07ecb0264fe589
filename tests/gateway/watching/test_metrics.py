"""Metrics: what is counted is what a scraper reads, and no label grows without bound."""

from __future__ import annotations

import math
import re
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry
from prometheus_client import Histogram as ClientHistogram
from prometheus_client.parser import text_string_to_metric_families

from coterie.gateway.watching import metrics as module
from coterie.gateway.watching.metrics import PREFIX, Histogram, Metrics
from pages import PAGES


def scraped(metrics: Metrics) -> dict[tuple[str, tuple[str, ...]], float]:
    """Name without prefix and label values, by label's name → value, as Prometheus' own parser reads them."""
    return {
        (sample.name.removeprefix(PREFIX), tuple(value for _, value in sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(metrics.render().decode())
        for sample in family.samples
    }


def test_counts_are_scraped() -> None:
    metrics = Metrics("1.2.3")
    metrics.requests.inc("/v1/completions", "ok")
    metrics.requests.inc("/v1/completions", "ok", by=2)
    metrics.decision_seconds.observe(3e-5, "decode")
    metrics.worker_running.set(4, "w1")
    metrics.queue_length.set(7)
    found = scraped(metrics)
    assert found["requests_total", ("ok", "/v1/completions")] == 3
    assert found["requests_total", ("failed", "/v1/completions")] == 0, "there before its first event"
    assert found["decision_seconds_bucket", ("2e-05", "decode")] == 0
    assert found["decision_seconds_bucket", ("5e-05", "decode")] == 1
    assert found["decision_seconds_count", ("decode",)] == 1
    assert found["worker_running", ("w1",)] == 4
    assert found["queue_length", ()] == 7
    assert found["build_info", ("1.2.3",)] == 1


@given(st.lists(st.floats(0, 100), max_size=50))
def test_a_histogram_is_that_of_the_prometheus_client(values: list[float]) -> None:
    bounds = (0.0, 0.5, 1.0, 10.0)
    ours, theirs = Histogram("h", "h", bounds), ClientHistogram(f"{PREFIX}h", "h", registry=None, buckets=bounds)
    for value in values:
        ours.observe(value)
        theirs.observe(value)
    registry, reference = CollectorRegistry(), {}
    registry.register(theirs)
    for sample in next(iter(registry.collect())).samples:
        reference[sample.name, sample.labels.get("le")] = sample.value
    for sample in ours.collect().samples:
        assert sample.value == pytest.approx(reference[sample.name, sample.labels.get("le")], rel=1e-9)


def test_values_that_would_spoil_a_sum_are_left_out() -> None:
    metrics = Metrics()
    for value in (math.nan, math.inf, -1.0):
        metrics.ttft_seconds.observe(value)
    metrics.ttft_seconds.observe(0.5)
    values = scraped(metrics)
    assert (values["ttft_seconds_sum", ()], values["ttft_seconds_count", ()]) == (0.5, 1)


def test_unknown_values_of_a_listed_label_share_one() -> None:
    metrics = Metrics()
    for number in range(100):
        metrics.requests.inc(f"/etc/passwd?{number}", "ok")
    found = scraped(metrics)
    assert found["requests_total", ("ok", "other")] == 100
    assert not any("passwd" in value for _, values in found for value in values)


def test_free_labels_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_SERIES", 30)
    metrics = Metrics()
    for number in range(130):
        metrics.routed.inc("decode", f"w{number}")
        metrics.worker_running.set(1, f"w{number}")
        metrics.decision_seconds.observe(1.0, f"pool{number}")
    found = scraped(metrics)
    assert found["routed_total", ("other", "other")] == 100
    for name in ("routed_total", "worker_running", "decision_seconds_count"):
        assert sum(key == name for key, _ in found) == 31


def test_a_worker_that_leaves_takes_its_series_along() -> None:
    metrics = Metrics()
    for worker in ("stays", "leaves"):
        metrics.worker_running.set(1, worker)
        metrics.breaker_state.set(2, worker)
        metrics.routed.inc("decode", worker)
        metrics.worker_failures.inc(worker, "reset")
    metrics.forget_worker("leaves")
    assert b"leaves" not in metrics.render()
    assert metrics.render().count(b"stays") == 4


def test_values_kept_elsewhere_are_read_when_scraped() -> None:
    metrics, running = Metrics(), {("w1",): 3.0}
    metrics.worker_running.read = lambda: running
    metrics.connections_accepted.read = lambda: {(): 12.0}
    assert scraped(metrics)["worker_running", ("w1",)] == 3
    running.clear()
    assert ("worker_running", ("w1",)) not in scraped(metrics)
    assert scraped(metrics)["connections_accepted_total", ()] == 12


def test_a_source_that_fails_costs_its_own_metric() -> None:
    metrics = Metrics()
    metrics.worker_running.read = lambda: {("too", "many"): 1.0}
    metrics.queue_length.read = lambda: {(): 1 / 0}
    found = scraped(metrics)
    assert ("queue_length", ()) not in found
    assert found["errors_total", ("ZeroDivisionError",)] == found["errors_total", ("TypeError",)] == 1
    assert found["in_flight", ()] == 0


def test_a_wrong_number_of_labels_is_said() -> None:
    with pytest.raises(TypeError, match=r"1 label values .* the metric has 2: \('path', 'outcome'\)"):
        Metrics().requests.inc("ok")


def test_label_values_are_escaped() -> None:
    metrics = Metrics()
    metrics.worker_running.set(1, 'w"1\n# HELP x\\')
    assert scraped(metrics)["worker_running", ('w"1\n# HELP x\\',)] == 1


def test_names_and_help_hold() -> None:
    table = Metrics().all
    assert len({row.name for row in table}) == len(table)
    for row in table:
        assert re.fullmatch(r"coterie_gateway_[a-z0-9_]+", row.name)
        assert row.name.endswith("_total") == (row.kind == "counter")
        assert row.help[0].isupper() or row.help[0].isdigit()
        assert not row.help.endswith(".")
        assert not {"request", "id", "prompt", "expert", "caller"} & set(row.labels.names)


def test_bounds_increase_and_cover_what_is_measured() -> None:
    metrics = Metrics()
    for histogram in (metrics.decision_seconds, metrics.ttft_seconds, metrics.tpot_seconds, metrics.predicted_experts):
        assert all(low < high for low, high in pairwise(histogram.bounds))
    assert (metrics.decision_seconds.bounds[0], metrics.decision_seconds.bounds[-1]) == (1e-5, 1e-2)
    assert (metrics.ttft_seconds.bounds[0], metrics.ttft_seconds.bounds[-1]) == (1e-3, 60.0)
    assert (metrics.tpot_seconds.bounds[0], metrics.tpot_seconds.bounds[-1]) == (1e-4, 2.0)


def test_the_page_lists_every_metric() -> None:
    rows = [
        f"| `{row.name}` | {row.kind} | {', '.join(f'`{label}`' for label in row.labels.names)} | {row.help} |"
        for row in Metrics().all
    ]
    shown = [
        line for line in PAGES["docs/gateway/watching"].read_text().splitlines() if line.startswith(f"| `{PREFIX}")
    ]
    assert [re.sub(" +", " ", line) for line in shown] == [re.sub(" +", " ", row) for row in rows]
