"""The advice on made traffics is the one that follows from how they are made."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from coterie import open_trace
from coterie.answers.advise.advising import Advised, AdviseSettings, advise
from coterie.answers.advise.decisions import NOT_NOW, ON, TOO_LITTLE, TRY
from coterie.answers.fleet.bench import Source
from coterie.models import get_model
from coterie.routing import calibration
from coterie.traces import ActivationTrace
from made_traffics import MODEL, TRAFFICS, MadeTraffic


def advised(made: MadeTraffic, trace: ActivationTrace | None = None, splits: int = 6) -> Advised:
    settings = AdviseSettings(
        decoders=made.decoders, in_flight=made.in_flight, ranks=made.ranks, kv_tokens=made.kv_tokens, splits=splits
    )
    used = trace or made.trace
    return advise(Source(used, calibration(used)), MODEL, settings)


@pytest.mark.long
@pytest.mark.parametrize("name", TRAFFICS)
def test_the_right_advice_on_traffic_whose_answer_is_known(name: str) -> None:
    made = TRAFFICS[name]()
    found = advised(made)
    assert {key: found.answers[key] for key in made.answers} == dict(made.answers), found.verdict
    pays = {ON, TRY} & set(found.answers.values())
    assert found.verdict.startswith("Nothing pays") == (not pays)


@pytest.mark.long
def test_where_prefixes_and_experts_pull_apart_the_router_prices_both() -> None:
    found = advised(TRAFFICS["prefixes against experts"]())
    gains = {arm.name: arm.gain.mean for arm in found.decision("routing").arms}
    assert found.decision("routing").chosen == "latency_aware"
    assert gains["locality_band"] < gains["joint:experts=0"] <= gains["latency_aware"]


@pytest.mark.long
@pytest.mark.parametrize("name", ["gpt-oss-20b/routing.npz", "deepseek-v2-lite/routing_tokens.npz"])
def test_on_recorded_traffic_it_agrees_with_which_lever(data_dir: Path, name: str) -> None:
    trace = open_trace(data_dir / "activations" / name)
    assert isinstance(trace, ActivationTrace)
    found = advise(Source(trace, calibration(trace)), get_model(trace.meta.model), AdviseSettings())
    assert found.answers == {
        "routing": ON,
        "routing_by_experts": ON,
        "batching": NOT_NOW,
        "graph_sizes": NOT_NOW,  # 16 requests have a graph of their own
        "placement": ON,
        "live_loop": TOO_LITTLE,  # no times
    }


def test_small_recordings_get_an_answer_too() -> None:
    made = TRAFFICS["only placement"]()
    few = ActivationTrace.from_arrays(made.trace.meta, *_first(made.trace, 48))
    found = advised(made._replace(decoders=2, in_flight=8), few, splits=3)
    assert found.answers["placement"] == ON
    assert found.answers["live_loop"] == TOO_LITTLE, "no times"
    assert found.answers["routing"] in (NOT_NOW, TOO_LITTLE)
    assert found.decision("placement").data["eplb"]["interval_steps"] > 0
    json = found.to_json()
    assert [one["key"] for one in json["decisions"]] == list(found.answers)
    assert json["settings"]["decoders"] == 2


def test_a_fleet_that_a_recording_cannot_keep_busy_is_not_judged() -> None:
    made = TRAFFICS["only placement"]()
    few = ActivationTrace.from_arrays(made.trace.meta, *_first(made.trace, 16))
    found = advised(made, few, splits=2)
    assert set(found.answers.values()) == {TOO_LITTLE}
    assert AdviseSettings().decoders_for(1000) == 8
    assert AdviseSettings().decoders_for(213) == 4
    assert AdviseSettings(decoders=3).decoders_for(10) == 3


def _first(trace: ActivationTrace, count: int) -> tuple[np.ndarray, np.ndarray, None, np.ndarray]:
    tokens, offsets = trace.arrays()
    end = int(offsets[count])
    return np.asarray(tokens.expert_ids[:end]), np.asarray(offsets[: count + 1]), None, np.asarray(tokens.phase[:end])
