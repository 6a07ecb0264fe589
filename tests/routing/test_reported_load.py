"""What workers report to a fleet: requests of other front ends, KV use, and prompts still to compute."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from books import check_fleet
from coterie.errors import ConfigError
from coterie.routing import Fleet, Request, Router, routers
from coterie.testing import check_router
from coterie.types import Placement
from routing_cases import COST, EXPERTS, LAYERS, WORKERS, draw, fitted

PLACEMENT = Placement.linear(LAYERS, EXPERTS, WORKERS, 2 * WORKERS)
CONTEXT = {"fitted": fitted(), "cost": COST, "labels": {"code": (1, 2)}, "placement": PLACEMENT}
BY_LOAD = ("join_shortest_queue", "power_of_two", "pressure", "latency_aware", "locality_band", "joint")
"""Routers that prefer workers with fewer requests."""


def named(name: str) -> Router:
    settings = {"locality_band": {"band": 1.0}}.get(name, {})  # no worker is too unlike
    return routers.make(name, CONTEXT, **settings)


@pytest.mark.parametrize("name", sorted(routers))
def test_reports_of_own_requests_change_no_decision(name: str) -> None:
    """However late a report is: it holds at most the requests that ran since the one before."""
    rng, drawn, router = np.random.default_rng(0), draw(120, 3), named(name)
    plain, reported = (fitted().fleet(64) for _ in range(2))
    there: list[str] = []
    for number in range(120):
        request = Request(str(number), 50, drawn.prefill[number], None, rng.integers(0, 50, WORKERS))
        decision, other = (router.route(request, fleet) for fleet in (plain, reported))
        assert decision.worker == other.worker
        np.testing.assert_array_equal(decision.scores, other.scores)
        for fleet in (plain, reported):
            fleet.admit(request.id, decision.worker, 50, decision.profile)
        there.append(request.id)
        if len(there) > 30:
            gone = there.pop(int(rng.integers(len(there))))
            plain.finish(gone)
            reported.finish(gone)
        for worker in np.flatnonzero(rng.random(WORKERS) < 0.3).tolist():
            reported.observe(worker, int(rng.integers(0, reported.peak[worker] + 1)))
        np.testing.assert_array_equal(reported.in_flight, reported.running)
        check_fleet(reported)


@pytest.mark.parametrize("name", BY_LOAD)
def test_requests_of_others_are_avoided(name: str) -> None:
    drawn, chosen = draw(60, 4), Counter[int]()
    fleet = fitted().fleet(64)
    fleet.observe(2, 40)
    for number in range(60):
        decision = named(name).route(Request(str(number), 50, drawn.prefill[number]), fleet)
        fleet.admit(str(number), decision.worker, 50, decision.profile)
        chosen[decision.worker] += 1
    assert chosen[2] == 0, "40 others are there; the six share 60"
    assert len(chosen) == WORKERS - 1


@pytest.mark.parametrize("name", sorted(routers))
def test_a_worker_full_of_others_is_not_chosen(name: str) -> None:
    fleet, drawn = fitted().fleet(4), draw(1, 5)
    for worker in range(1, WORKERS):
        fleet.observe(worker, 4)
    assert fleet.open.tolist() == [True] + [False] * (WORKERS - 1)
    assert named(name).route(Request("r", 50, drawn.prefill[0]), fleet).worker == 0
    fleet.observe(0, 99)
    assert fleet.open.all(), "where all are full, requests queue"


def test_the_contract_of_routers_holds_with_others_about() -> None:
    for name in sorted(routers):
        check_router(lambda name=name: named(name), LAYERS, EXPERTS, WORKERS)  # type: ignore[misc]


@given(st.lists(st.tuples(st.sampled_from("arfo"), st.integers(0, 2), st.integers(0, 9)), max_size=40))
def test_counts_follow_their_definition(actions: list[tuple[str, int, int]]) -> None:
    """Requests arrive (a), have their prompt computed (r), finish (f); workers report (o)."""
    fleet, there = Fleet([9] * 3), dict[str, list[int]]()
    peak, others = [0] * 3, [0] * 3
    for number, (action, worker, tokens) in enumerate(actions):
        if action == "a":
            there[f"r{number}"] = [worker, tokens]
            fleet.admit(f"r{number}", worker, 10, None, tokens)
        elif action == "o":
            others[worker] = max(0, tokens - peak[worker])
            peak[worker] = 0
            fleet.observe(worker, tokens, tokens / 9)
            assert fleet.kv_used[worker] == tokens / 9
        elif there:
            name = sorted(there)[tokens % len(there)]
            if action == "r":
                fleet.computed(name)
                there[name][1] = 0
            else:
                fleet.finish(name)
                del there[name]
        running = Counter(where for where, _ in there.values())
        peak = [max(peak[at], running[at]) for at in range(3)]
        uncomputed = [sum(left for where, left in there.values() if where == at) for at in range(3)]
        assert fleet.running.tolist() == [running[at] for at in range(3)]
        assert fleet.in_flight.tolist() == [running[at] + others[at] for at in range(3)]
        assert fleet.prefill_tokens.tolist() == uncomputed
        check_fleet(fleet)
    larger = Fleet([9] * 4)
    larger.take_over(fleet)
    assert larger.in_flight[:3].tolist() == fleet.in_flight.tolist()
    check_fleet(larger)


@given(st.lists(st.tuples(st.sampled_from("abfFxo"), st.integers(0, 2), st.integers(0, 9)), max_size=40))
def test_two_front_ends_count_every_request_once(actions: list[tuple[str, int, int]]) -> None:
    """Requests of two front ends arrive (a, b) and finish (f, F); they exchange (x), or a worker reports all (o)."""
    prior = np.full((3, 8), 0.25)
    mine, other, shared = (Fleet([9] * 3, prior) for _ in range(3))
    owner: dict[str, Fleet] = {}
    for number, (action, worker, tokens) in enumerate(actions):
        if action in "ab":
            owner[f"r{number}"] = mine if action == "a" else other
            for fleet in (owner[f"r{number}"], shared):
                fleet.admit(f"r{number}", worker, 10 + tokens, prior[0] * tokens / 9, tokens)
        elif action in "fF" and owner:
            name = sorted(owner)[tokens % len(owner)]
            for fleet in (owner.pop(name), shared):
                fleet.finish(name)
        elif action == "o":
            mine.observe(worker, int(shared.running[worker]))
        elif action == "x":
            mine.hear(other.own())
            known = mine.own()
            for name, part, whole in zip(known._fields, known.plus(other.own()), shared.own(), strict=True):
                np.testing.assert_array_equal(part, whole, err_msg=name)
            np.testing.assert_array_equal(mine.context_tokens, shared.context_tokens)
            assert mine.routed == shared.routed
        beyond = mine.in_flight - mine.running - mine.heard.running
        assert (beyond >= 0).all()
        check_fleet(mine)


def test_a_request_that_a_worker_and_its_front_end_tell_of_counts_once() -> None:
    mine, other = Fleet([9] * 2), Fleet([9] * 2)
    for number in range(5):
        other.admit(str(number), 0)
    mine.observe(0, 5)
    assert mine.in_flight.tolist() == [5, 0], "seen by the worker's report before the exchange"
    mine.hear(other.own())
    assert mine.in_flight.tolist() == [5, 0]
    mine.observe(0, 7)
    assert mine.in_flight.tolist() == [7, 0], "two are of a front end that says nothing"
    mine.hear(Fleet([9] * 2).own())
    assert mine.in_flight.tolist() == [2, 0]
    larger = Fleet([9] * 3)
    mine.hear(other.own())
    larger.take_over(mine)
    assert larger.heard.running.tolist() == [5, 0, 0]
    larger.hear(Fleet([9] * 3).own())
    assert larger.in_flight.tolist() == larger.running.tolist() == [0, 0, 0]


def test_tokens_to_compute_are_within_the_context() -> None:
    fleet = Fleet([4])
    for wrong in (-1, 11, 1 << 50):
        with pytest.raises(ConfigError, match=f"uncomputed={wrong} and context=10 must be in 0"):
            fleet.admit("r", 0, 10, None, wrong)
    with pytest.raises(ConfigError, match="'r' is not in the fleet"):
        fleet.computed("r")
    assert fleet.prefill_tokens.tolist() == fleet.running.tolist() == [0]
