"""Several front ends of one fleet: what each of their routers sees, and when."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from books import check_fleet
from coterie.costs.presets import step_model
from coterie.errors import ConfigError
from coterie.footprints.counting import footprint
from coterie.routing import Decision, Fleet, JoinShortestQueue, Request, RoundRobin, Router
from coterie.sim.fleet.front_ends import FrontEnds, SeenFleets, Told
from coterie.sim.fleet.metrics import FleetRun
from coterie.sim.fleet.requests import FleetRequests, Recordings
from coterie.sim.fleet.run import FleetConfig, run_fleet
from fleet_checks import run_checked
from fleet_steps import SPEC

MODEL = step_model(SPEC, "h200")
CONFIG = FleetConfig(decode_workers=3, places=8)
SIZE = SPEC.num_moe_layers * SPEC.num_experts
PRIOR = np.full((3, SIZE), SPEC.top_k / SPEC.num_experts)


@dataclass(frozen=True)
class ByExperts:
    """The fewest new experts a step, and a little for every request there."""

    def route(self, request: Request, fleet: Fleet) -> Decision:
        assert request.footprint is not None
        profile = (request.footprint / max(1, request.prompt_tokens)).reshape(-1).astype(np.float32)
        scores = fleet.missed.astype(np.float64) @ profile + 5.0 * fleet.in_flight
        return Decision(int(np.argmin(scores)), scores, "fewest", profile)


@dataclass(frozen=True)
class Spy:
    """Keeps the requests that it sees at the workers, by decision."""

    inner: Router
    seen: list[tuple[int, list[int], list[int]]] = field(default_factory=list)

    def route(self, request: Request, fleet: Fleet) -> Decision:
        check_fleet(fleet)
        self.seen.append((int(request.id), fleet.in_flight.tolist(), fleet.running.tolist()))
        return self.inner.route(request, fleet)


def requests(count: int = 150) -> FleetRequests:
    rng = np.random.default_rng(0)
    prompt, decode = np.full(60, 6), rng.integers(1, 30, 60)
    first = np.concatenate([[0], np.cumsum(prompt + decode)[:-1]])
    shape = (int((prompt + decode).sum()), SPEC.num_moe_layers, SPEC.num_experts)
    ids = rng.random(shape).argsort(axis=2)[:, :, : SPEC.top_k].astype(np.uint8)
    shown = np.array([footprint(ids[at : at + 6], SPEC.num_experts) for at in first])
    made = Recordings(ids, SPEC.num_experts, first, prompt, first + prompt, decode, shown)
    picked = rng.integers(60, size=count)
    return FleetRequests(made, picked, np.full(count, 6), made.decode_rows[picked])


def serve(router: Router, front_ends: FrontEnds, **given: Any) -> FleetRun:
    config = replace(CONFIG, front_ends=front_ends)
    return run_checked(requests(), MODEL, router, config, in_flight=12, fleet=Fleet([8] * 3, PRIOR), **given)


def same(one: FleetRun, other: FleetRun) -> bool:
    return all(np.asarray(a).tobytes() == np.asarray(b).tobytes() for a, b in zip(one, other, strict=True))


@pytest.mark.parametrize("router", [JoinShortestQueue(), RoundRobin(), ByExperts()])
def test_without_delay_many_front_ends_are_one(router: Router) -> None:
    plain = serve(router, FrontEnds())
    for told in ("profiles", "counts", "reports", "nothing"):
        assert same(plain, serve(router, FrontEnds(1, 0.5, told)))
    assert same(plain, serve(router, FrontEnds(4)))
    if not isinstance(router, ByExperts):
        assert same(plain, serve(router, FrontEnds(4, told="counts"))), "counts are all that this router looks at"


@given(
    st.integers(2, 5),
    st.sampled_from([0.0, 0.003, 0.02, 10.0]),
    st.sampled_from(["profiles", "counts", "reports", "nothing"]),
)
@settings(max_examples=25)
def test_what_is_seen_follows_its_definition(count: int, every_s: float, told: Told) -> None:
    """Own requests now, and the others' as they were at the last whole multiple of the interval."""
    spy, front_ends = Spy(JoinShortestQueue()), FrontEnds(count, every_s, told)
    run = serve(spy, front_ends)
    of = np.random.default_rng([0, 3]).integers(count, size=len(run.arrival_s))
    if every_s == 0 and told == "profiles":
        of[:] = 0
    decided: list[int] = []
    for request, seen, own in spy.seen:
        now, begun = run.arrival_s[request], np.array(decided, np.int64)
        begun = begun[run.finish_s[begun] > now]  # requests that run now
        mine = begun[of[begun] == of[request]]
        assert own == np.bincount(run.decoder[mine], minlength=3).tolist()
        if told != "reports":  # an older report may hold requests that ended meanwhile
            then = int(now / every_s) * every_s if every_s else now
            before = np.array(decided, np.int64)
            if every_s:
                before = before[run.arrival_s[before] < then]
            others = before[
                (run.finish_s[before] >= then if every_s else run.finish_s[before] > now) & (of[before] != of[request])
            ]
            if told == "nothing":
                others = others[:0]
            assert seen == np.bincount(run.decoder[np.concatenate([mine, others])], minlength=3).tolist()
        elif every_s == 0:
            assert (np.array(own) <= seen).all()
            assert (seen <= np.bincount(run.decoder[begun], minlength=3)).all(), "a few go unseen, none counts twice"
        decided.append(request)


def test_without_exchange_front_ends_are_independent() -> None:
    """Each decides as if it were alone with its requests, at the same moments."""
    spy = Spy(JoinShortestQueue())
    run = serve(spy, FrontEnds(3, 0.01, "nothing"))
    of = np.random.default_rng([0, 3]).integers(3, size=len(run.arrival_s))
    alone, there = [Fleet([8] * 3) for _ in range(3)], [dict[int, float]() for _ in range(3)]
    for request, _, _ in spy.seen:
        fleet, running = alone[of[request]], there[of[request]]
        for gone in [one for one, end_s in running.items() if end_s <= run.arrival_s[request]]:
            fleet.finish(str(gone))
            del running[gone]
        assert JoinShortestQueue().route(Request(), fleet).worker == run.decoder[request]
        fleet.admit(str(request), int(run.decoder[request]))
        running[request] = run.finish_s[request]


def test_experts_of_the_others_are_seen_with_profiles_alone() -> None:
    cases: tuple[tuple[Told, int], ...] = (("profiles", 2), ("counts", 1), ("reports", 1), ("nothing", 1))
    for told, tracked in cases:
        fleets = SeenFleets(FrontEnds(2, 1.0, told), Fleet([8] * 3, PRIOR), 40)
        rng = np.random.default_rng([0, 3])
        of = rng.integers(2, size=40).tolist()
        for request in range(20):
            fleets.of(request, 0.5).admit(str(request), request % 3, 6, PRIOR[0].astype(np.float32))
        seen = fleets.of(of.index(0), 1.5)
        mine = sum(front_end == 0 for front_end in of[:20])
        assert seen.own().profiled.sum() == mine
        assert seen._profiled.sum() == (20 if tracked == 2 else mine)
        assert seen.in_flight.sum() == (mine if told == "nothing" else 20)
        assert fleets.fleets[1].running.sum() == 20 - mine, "every request is at one front end"


def test_what_cannot_be_simulated_is_named() -> None:
    for refused in (FleetConfig(both=True), FleetConfig(kv_tokens=100)):
        with pytest.raises(
            ConfigError, match=r"front_ends\.count=2 must be 1 where workers do both, or with kv_tokens"
        ):
            replace(refused, front_ends=FrontEnds(2))
    wrong: tuple[dict[str, Any], ...] = ({"count": 0}, {"every_s": -1.0}, {"every_s": 1e-310}, {"told": "all"})
    for given_ in wrong:
        with pytest.raises(ConfigError):
            FrontEnds(**given_)

    class Watching:
        def tick(self, _now_s: float, _ended: Any) -> None:
            raise AssertionError

    with pytest.raises(ConfigError, match=r"front_ends\.count=2 must be 1 with a controller"):
        run_fleet(
            requests(),
            MODEL,
            RoundRobin(),
            replace(CONFIG, front_ends=FrontEnds(2)),
            in_flight=2,
            controller=Watching(),
        )
