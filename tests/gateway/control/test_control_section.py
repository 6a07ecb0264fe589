"""Section `control` of a gateway's config."""

from __future__ import annotations

from pathlib import Path

import pytest

from coterie.control import ControlSettings
from coterie.errors import InputError
from coterie.gateway.config import ControlSection, GatewayConfig, parse_config

FILE = Path("gateway.yaml")


def test_the_defaults_are_the_loops_own() -> None:
    assert ControlSection().settings() == ControlSettings()


def test_a_file_sets_it() -> None:
    text = """
workers: [{id: a, url: "http://127.0.0.1:1", expert_events: "tcp://127.0.0.1:5602"}]
control: {min_requests: 100, cooldown_s: 5, advise: {ranks: 8, slots_per_rank: 5}, apply: true, map: plan.json}
"""
    config = parse_config(text, FILE)
    settings = config.control.settings()
    assert (settings.min_requests, settings.cooldown_s) == (100, 5.0)
    assert config.control.advise is not None
    assert config.control.advise.slots_per_rank == 5
    assert config.workers[0].expert_events == "tcp://127.0.0.1:5602"


@pytest.mark.parametrize(
    ("section", "said"),
    [
        ("{tick_s: 0}", "tick_s=0"),
        ("{apply: true}", "needs map"),
        ("{apply: true, map: a.json}", "needs advise"),
        ("{min_requests: 1}", "min_requests=1"),
        ("{fit_requests: 10}", "fit_requests=10 must be at least min_requests=64"),
        ("{advise: {ranks: 0}}", "ranks=0"),
        ("{advise: {ranks: 4, movement: later}}", "later"),
        ("{advise: {}}", "ranks"),
        ("{score: luck}", "luck"),
        ("{interval: 5}", "interval"),
    ],
)
def test_a_wrong_section_is_refused_in_one_line(section: str, said: str) -> None:
    with pytest.raises(InputError) as refused:
        parse_config(f"control: {section}", FILE)
    assert said in str(refused.value)
    assert "\n" not in str(refused.value)


def test_an_endpoint_of_events_is_checked() -> None:
    with pytest.raises(InputError, match="expert_events='here' must begin with tcp://"):
        parse_config('workers: [{id: a, url: "http://127.0.0.1:1", expert_events: here}]', FILE)


def test_it_is_off_by_itself_without_events() -> None:
    assert GatewayConfig().control == ControlSection()
    assert GatewayConfig().control.enabled is None
