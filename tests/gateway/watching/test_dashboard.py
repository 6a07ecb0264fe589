"""The Grafana dashboard: every metric and label it names exists, and it is what Grafana imports."""

from __future__ import annotations

import json
import re
from importlib.resources import files
from typing import Any

import pytest

from coterie.gateway.watching.metrics import PREFIX, Metrics

DASHBOARD: dict[str, Any] = json.loads(files("coterie").joinpath("data/grafana/coterie-gateway.json").read_text())
PANELS: list[dict[str, Any]] = DASHBOARD["panels"]
SHOWN = [panel for panel in PANELS if panel["type"] != "row"]


def series() -> dict[str, set[str]]:
    """Name of a series → its labels, those of Prometheus included."""
    found: dict[str, set[str]] = {}
    for row in Metrics().all:
        labels = {*row.labels.names, "instance", "job"}
        if row.kind == "histogram":
            found |= {f"{row.name}_bucket": {*labels, "le"}, f"{row.name}_sum": labels, f"{row.name}_count": labels}
        else:
            found[row.name] = labels
    return found


def test_it_has_what_grafana_needs() -> None:
    assert DASHBOARD["uid"] == "coterie-gateway"
    assert isinstance(DASHBOARD["schemaVersion"], int)
    assert DASHBOARD["schemaVersion"] >= 36, "the first with data sources as objects"
    assert {variable["name"] for variable in DASHBOARD["templating"]["list"]} == {"datasource", "instance"}
    assert {"title", "time", "refresh", "annotations", "version"} <= set(DASHBOARD)
    assert "id" not in DASHBOARD, "an id of another Grafana would be refused"


def test_rows_are_those_asked_for() -> None:
    rows = [panel["title"] for panel in PANELS if panel["type"] == "row"]
    assert rows == ["Traffic", "Latency", "Workers", "Experts and cache", "Faults"]


def test_panels_have_ids_titles_and_sources() -> None:
    ids = [panel["id"] for panel in PANELS]
    assert len(set(ids)) == len(ids)
    for panel in SHOWN:
        assert panel["title"]
        assert panel["description"]
        assert panel["datasource"] == {"type": "prometheus", "uid": "${datasource}"}
        letters = [target["refId"] for target in panel["targets"]]
        assert letters
        assert len(set(letters)) == len(letters)


def test_panels_do_not_overlap() -> None:
    taken: dict[tuple[int, int], str] = {}
    for panel in PANELS:
        place = panel["gridPos"]
        assert 0 <= place["x"] < place["x"] + place["w"] <= 24
        for x in range(place["x"], place["x"] + place["w"]):
            for y in range(place["y"], place["y"] + place["h"]):
                assert (x, y) not in taken, f"{panel['title']} lies on {taken[x, y]}"
                taken[x, y] = panel["title"]


@pytest.mark.parametrize("panel", SHOWN, ids=lambda panel: panel["title"])
def test_what_a_panel_asks_for_exists(panel: dict[str, Any]) -> None:
    known = series()
    for target in panel["targets"]:
        expression = target["expr"]
        named = re.findall(rf"{PREFIX}\w+", expression)
        assert named, expression
        assert set(named) <= set(known), expression
        labels = set.intersection(*(known[name] for name in named))
        used = {label.strip() for group in re.findall(r"by \(([^)]*)\)", expression) for label in group.split(",")}
        used |= {label for group in re.findall(r"\{([^}]*)\}", expression) for label in re.findall(r"(\w+)[=!]", group)}
        used |= set(re.findall(r"\{\{(\w+)\}\}", target["legendFormat"]))
        # A label such as source="reported" need only be on the metric it stands at.
        assert used <= labels | set.union(*(known[name] for name in named)), expression
        assert expression.count("(") == expression.count(")")
        for name in named:
            if name.endswith("_total") or name.endswith("_bucket"):
                assert re.search(rf"(rate|increase)\({name}\{{", expression), f"{name} is a total: show its rate"


def test_the_metrics_of_the_contract_are_shown() -> None:
    text = json.dumps(DASHBOARD)
    for name in (
        "requests_total",
        "rejected_total",
        "ttft_seconds_bucket",
        "tpot_seconds_bucket",
        "decision_seconds_bucket",
        "queue_seconds_bucket",
        "queue_length",
        "worker_running",
        "breaker_state",
        "cached_tokens_total",
        "distinct_experts",
        "predicted_experts_bucket",
        "footprints_total",
        "fallbacks_total",
        "retries_total",
        "handoffs_total",
    ):
        assert PREFIX + name in text
