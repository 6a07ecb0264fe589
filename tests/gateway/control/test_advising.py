"""Placement advice of the live loop: made on one window, measured on the next, written only where that is asked for."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from control_cases import EXPERTS, LAYERS, load_event, saved_fit
from coterie.gateway.config import AdviseSection, ControlSection
from coterie.gateway.control.driver import Driver
from coterie.gateway.control.messages import ControlView, FromLoop, SetUp, StreamEntry, Told
from coterie.gateway.control.streams import ExpertStreams
from coterie.gateway.fleet.spec import RouterSpec
from coterie.placement.maps.formats import read_map

RANK_OF = {"a": 2, "b": 1, "c": 7}
ADVISE = AdviseSection(ranks=4, window_s=1.0, min_steps=4, horizon=1e9)


def advised(folder: Path, section: ControlSection, seconds: int = 6) -> list[ControlView]:
    """The views of a loop whose fleet calls eight of sixteen experts, which lie on two of four ranks."""
    sent: list[FromLoop] = []
    spec = RouterSpec("latency_aware", fit=saved_fit("low", folder))
    setup = SetUp(generation=1, spec=spec, rows=2, section=section, folder=str(folder), streams=[])
    driver, streams, rng = Driver(setup, sent.append, 0.0), ExpertStreams(None), np.random.default_rng(0)
    for second in range(1, seconds + 1):
        for worker in ("a", "b"):
            driver.take(worker, msgspec.structs.replace(load_event("low", rng, tokens=512), seconds=0.9), second - 0.5)
        driver.tick(float(second), streams)
    streams.close()
    told = [one.view for one in sent if isinstance(one, Told) and one.view]
    return [msgspec.msgpack.decode(view, type=ControlView) for view in told]


def test_ranks_are_those_of_the_entries_and_wrong_ones_are_events(tmp_path: Path) -> None:
    sent: list[FromLoop] = []
    spec = RouterSpec("latency_aware", fit=saved_fit("low", tmp_path))
    entries = [StreamEntry(name, f"ipc://{tmp_path}/{name}", rank=rank) for name, rank in RANK_OF.items()]
    section = ControlSection(advise=ADVISE)
    setup = SetUp(generation=1, spec=spec, rows=2, section=section, folder=str(tmp_path), streams=entries)
    driver, streams, rng = Driver(setup, sent.append, 0.0), ExpertStreams(None), np.random.default_rng(0)
    for worker in reversed(RANK_OF):
        driver.take(worker, load_event("odd" if worker == "a" else "low", rng), 0.5)
    driver.tick(1.0, streams)
    advisor = driver.loop.advisor
    assert advisor is not None
    demand = [advisor.tracker.worker(rank) for rank in range(4)]
    assert [bool(one.any()) for one in demand] == [False, True, True, False]
    assert demand[2][:, 8:].any(), "a's experts"
    assert not demand[1][:, 8:].any()
    told = [event for one in sent if isinstance(one, Told) for event in one.events if event["kind"] == "ignored"]
    assert [event["values"]["worker"] for event in told] == ["c"]
    assert "placement_rank=7: the group has ranks 0 … 3" in told[0]["reason"]
    driver.resize(msgspec.structs.replace(setup, streams=entries[:2]))
    driver.tick(2.0, streams)
    assert not any(advisor.tracker.worker(rank).any() for rank in range(4)), "another fleet, other ranks"
    streams.close()


def plans(views: list[ControlView]) -> list[dict[str, Any]]:
    return [view.advice for view in views if view.advice is not None and view.advice["planned"]]


def test_advice_is_measured_on_a_window_it_was_not_planned_on(tmp_path: Path) -> None:
    found = plans(advised(tmp_path, ControlSection(advise=ADVISE)))
    assert found[0]["gain_next_pct"] is None
    assert found[-1]["gain_next_pct"] > 0, "half of the ranks did all the work; most of a small step is latency"
    assert max(found[-1]["before"]["rank_s"]) > 1.3 * max(found[-1]["after"]["rank_s"])
    assert found[-1]["after"]["balance"] > found[-1]["before"]["balance"]
    assert len(found[-1]["before"]["rank_s"]) == 4
    assert {one["state"] for one in found} == {"advised"}


def test_a_plan_is_written_only_where_that_is_asked_for(tmp_path: Path) -> None:
    map = tmp_path / "placement.json"
    asked = ControlSection(advise=ADVISE, map=str(map))
    advised(tmp_path, asked)
    assert not map.exists()
    views = advised(tmp_path, msgspec.structs.replace(asked, apply=True))
    written = read_map(map, num_ranks=4, num_experts=EXPERTS).placement
    assert written.slot_experts.shape == (LAYERS, EXPERTS)
    assert written.num_ranks == 4
    last = views[-1].advice
    assert last is not None
    assert last["state"] == "applied"
    assert last["maps"] == {}
    hot = np.sort(np.argsort(written.slot_experts, axis=1)[:, :8] // 4, axis=1)
    assert all(len(set(ranks)) == 4 for ranks in hot.tolist()), "the busy experts are spread over all ranks"


def test_a_map_that_cannot_be_written_is_said_and_nothing_else_stops(tmp_path: Path) -> None:
    map = tmp_path / "a folder"
    map.mkdir()
    views = advised(tmp_path, ControlSection(advise=ADVISE, map=str(map), apply=True))
    assert len(views) == 6
    assert {view.advice["state"] for view in views if view.advice is not None} == {"advised"}


@pytest.mark.parametrize(
    ("advise", "problem"),
    [
        (AdviseSection(ranks=4, model="no such model"), "no such model"),
        (AdviseSection(ranks=64, slots_per_rank=1, device="abacus"), "abacus"),
    ],
)
def test_fits_go_on_where_no_advice_can_be_given(tmp_path: Path, advise: AdviseSection, problem: str) -> None:
    views = advised(tmp_path, ControlSection(advise=advise), seconds=2)
    assert problem in views[-1].status["no_advice"]
    assert views[-1].advice is None
    assert set(views[-1].loads) == {"a", "b"}
