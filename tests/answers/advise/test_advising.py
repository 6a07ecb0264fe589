"""The advice on made traffics is the one that follows from how they are made."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from coterie import open_trace
from coterie.answers.advise.advising import Advised, AdviseSettings, advise
from coterie.answers.advise.decisions import NOT_NOW, ON, TOO_LITTLE, TRY
from coterie.answers.advise.tables import TableWindows
from coterie.answers.fleet.bench import Source
from coterie.answers.plan.plans import PlanOptions, make_plan
from coterie.models import get_model
from coterie.routing import calibration
from coterie.traces import ActivationTrace, LoadTable
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
    assert (found.answers["placement"] == ON) == (made.answers.get("placement") == ON)
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
    source, spec = Source(trace, calibration(trace)), get_model(trace.meta.model)
    fleet, group = (advise(source, spec, one) for one in AdviseSettings().apart(source, spec))
    assert fleet.answers | group.answers == {
        "routing": ON,
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
    assert "2 one-GPU decoders, 8 requests on each, and one expert-parallel group of 8 ranks" in found.verdict


def test_a_fleet_that_a_recording_cannot_keep_busy_is_not_judged() -> None:
    made = TRAFFICS["only placement"]()
    few = ActivationTrace.from_arrays(made.trace.meta, *_first(made.trace, 16))
    found = advised(made, few, splits=2)
    assert set(found.answers.values()) == {TOO_LITTLE}
    assert AdviseSettings().decoders_for(1000) == 8
    assert AdviseSettings().decoders_for(213) == 4
    assert AdviseSettings(decoders=3).decoders_for(10) == 3


def test_the_gain_of_placement_is_that_of_plan(tmp_path: Path) -> None:
    """On a shift: the earlier half gains less on the later one than every other request gains on the rest."""
    timed = TRAFFICS["shift"]().trace
    gains: list[float] = []
    for trace in (timed, ActivationTrace.from_arrays(timed.meta, *_first(timed, timed.num_requests))):
        trace.save(tmp_path / str(len(gains)))
        held_out = make_plan(PlanOptions(tmp_path / str(len(gains)))).held_out
        assert held_out is not None
        source = Source(trace, calibration(trace))
        _, group = AdviseSettings(splits=2).apart(source, MODEL)
        placement = advise(source, MODEL, group).decision("placement")
        assert placement.gain.mean == pytest.approx(held_out.gain_pct, abs=1e-9)
        assert held_out.what in placement.sentence
        gains.append(held_out.gain_pct)
    assert gains[0] < 0.9 * gains[1]


def test_a_load_table_answers_placement_as_plan_does(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    hot = np.where(np.arange(MODEL.num_experts) < 4, 8.0, 1.0)
    counts = rng.poisson(100 * hot, (12, MODEL.num_moe_layers, MODEL.num_experts)).astype(np.uint64)
    table = LoadTable(counts, MODEL.name)
    table.save(tmp_path / "table")
    windows = TableWindows.of(tmp_path / "table", table, MODEL)
    settings = AdviseSettings().apart(windows, MODEL)
    assert [one.decoders for one in settings] == [0], "a table has no requests for a fleet"
    found = advise(windows, MODEL, settings[0])
    held_out = make_plan(PlanOptions(tmp_path / "table")).held_out
    assert held_out is not None
    assert found.decision("placement").gain.mean == pytest.approx(held_out.gain_pct, abs=1e-9)
    assert found.answers == {
        "routing": TOO_LITTLE,
        "batching": TOO_LITTLE,
        "graph_sizes": TOO_LITTLE,
        "placement": ON,
        "live_loop": TOO_LITTLE,
    }
    assert "routing, batching, graph sizes (it takes recorded requests, and a load table has none)" in found.verdict
    few = advise(TableWindows.of(tmp_path / "table", LoadTable(counts[:3], MODEL.name), MODEL), MODEL, settings[0])
    assert few.answers["placement"] == TOO_LITTLE, "a gain without an interval"
    assert few.decision("placement").gain.low is None
    one = advise(TableWindows.of(tmp_path / "table", LoadTable(counts[:1], MODEL.name), MODEL), MODEL, settings[0])
    assert one.verdict.startswith("It cannot be told what pays")


def test_without_a_named_deployment_a_fleet_and_a_group_are_asked_for() -> None:
    trace = TRAFFICS["nothing pays"]().trace
    source = Source(trace, calibration(trace, np.arange(4)))
    fleet, group = AdviseSettings().apart(source, MODEL)
    assert (fleet.decoders, fleet.gpus, fleet.ranks) == (None, 1, 1)
    assert (group.decoders, group.ranks) == (0, 8)
    alone = AdviseSettings(dtype="fp8").apart(source, get_model("glm-5.2"))
    assert [one.decoders for one in alone] == [0], "its experts do not fit one GPU"


def _first(trace: ActivationTrace, count: int) -> tuple[np.ndarray, np.ndarray, None, np.ndarray]:
    tokens, offsets = trace.arrays()
    end = int(offsets[count])
    return np.asarray(tokens.expert_ids[:end]), np.asarray(offsets[: count + 1]), None, np.asarray(tokens.phase[:end])
