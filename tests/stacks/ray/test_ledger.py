"""The books of a Ray router: every request is counted once, wherever Serve sends it and whatever it reports first."""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from coterie.gateway.embedded import tiny_fit_path
from coterie.routing import Decision, Fleet, Request, routers
from coterie.stacks.ray.ledger import ReplicaLedger, open_ledger, read_request, states
from coterie.wire.footprints import WireFootprint, attach_footprint

PLACES = {"a": 2, "b": 2, "c": 2}


@dataclass(frozen=True, slots=True)
class Raising:
    """Chooses the first row for the keeper's trial requests and raises for all others."""

    def route(self, request: Request, fleet: Fleet) -> Decision:
        if request.prompt_tokens not in (0, 100):
            raise RuntimeError("on purpose")
        return Decision(int(np.flatnonzero(fleet.alive)[0]), np.zeros(len(fleet)), "first")


def params(tokens: int = 5, **more: Any) -> dict[str, Any]:
    counts = np.zeros((4, 32), np.uint16)
    counts[:, :4] = tokens
    given = {"remote_host": "h", **more}
    attach_footprint(given, WireFootprint(counts, (0, 1, 2, 3), tokens))
    return given


def ledger_of(router: str = "join_shortest_queue", **settings: Any) -> ReplicaLedger:
    ledger = ReplicaLedger({"router": router, **settings})
    ledger.keeper.follow(PLACES)
    return ledger


def is_empty(ledger: ReplicaLedger) -> bool:
    state = ledger.state()
    fleet = ledger.keeper.fleet
    return state["requests"] == state["unfinished"] == 0 and not fleet.running.any() and not fleet.context_tokens.any()


class TestReadRequest:
    def test_from_a_body_and_from_an_attribute(self) -> None:
        for argument in ({"kv_transfer_params": params()}, SimpleNamespace(kv_transfer_params=params())):
            known = read_request(["/v1/completions", argument, "name"])
            assert known.footprint == "answer"
            assert known.request.prompt_tokens == 5
            assert known.request.prefilled
            assert known.request.footprint is not None

    @pytest.mark.parametrize("argument", [None, "text", {}, {"kv_transfer_params": None}, {"kv_transfer_params": {}}])
    def test_without(self, argument: Any) -> None:
        known = read_request([argument])
        assert (known.footprint, known.request.footprint, known.request.prefilled) == ("none", None, False)

    @pytest.mark.parametrize("text", ["no base64", "AAAA", 7])
    def test_a_damaged_footprint_is_left_out(self, text: Any) -> None:
        known = read_request([{"kv_transfer_params": {"coterie_footprint": text, "remote_host": "h"}}])
        assert (known.footprint, known.request.footprint, known.request.prefilled) == ("refused", None, True)

    def test_an_impossible_one_too(self) -> None:
        given = {"remote_host": "h"}
        attach_footprint(given, WireFootprint(np.full((1, 4), 9, np.uint8), (0,), 3))
        assert read_request([{"kv_transfer_params": given}]).footprint == "refused"


class TestLedger:
    def test_the_order_begins_with_the_choice_and_ends_with_the_tried(self) -> None:
        ledger = ledger_of()
        choice, order = ledger.choose("1", Request(), tried=["a"])
        assert order[0] == choice.worker_id != "a"
        assert sorted(order) == ["a", "b", "c"]
        assert order[-1] == "a"

    def test_asked_again_it_stays(self) -> None:
        ledger = ledger_of()
        first = ledger.choose("1", Request())[1]
        assert ledger.choose("1", Request())[1] == first
        assert len(ledger.keeper.requests) == 1
        ledger.died(first[0])
        assert ledger.choose("1", Request())[0].worker_id != first[0]

    def test_sent_elsewhere_it_moves_with_its_profile(self) -> None:
        ledger = ledger_of("latency_aware", fit=str(tiny_fit_path()))
        assert ledger.problem == ""
        counts = np.zeros((ledger.keeper.fleet.missed.shape[1] // 32, 32), np.int64)
        counts[:, :4] = 5
        choice, order = ledger.choose("1", Request("", 5, counts, prefilled=True))
        assert choice.fallback is None
        ledger.sent("1", "r", order[-1])
        assert ledger.keeper.running(order[-1]) == 1
        assert ledger.keeper.fleet._profiled.sum() == 1
        ledger.ended("r", order[-1])
        assert is_empty(ledger)

    def test_a_raising_router_answers_and_is_counted(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setitem(routers._items, "raising", Raising)
        ledger = ledger_of("raising")
        choice, order = ledger.choose("1", Request("", 7))
        assert choice.fallback == "router_error"
        assert sorted(order) == ["a", "b", "c"]
        ledger.sent("1", "r", order[0])
        ledger.ended("r", order[0])
        assert is_empty(ledger)
        assert ledger.state()["fallbacks"] == {"router_error": 1}

    @pytest.mark.parametrize("settings", [{"router": "eplb"}, {"fit": "/nowhere"}, {"router": 7}, {"places": "x"}])
    def test_settings_that_make_no_router_leave_the_shortest_queue(self, settings: dict[str, Any]) -> None:
        ledger = ReplicaLedger(settings)
        ledger.keeper.follow(PLACES)
        assert ledger.problem
        assert sorted(ledger.choose("1", Request())[1]) == ["a", "b", "c"]

    def test_attempts_of_one_request_end_by_replica(self) -> None:
        ledger = ledger_of()
        for number, replica in enumerate("aab"):
            ledger.choose(str(number), Request())
            ledger.sent(str(number), "r", replica)
        assert ledger.state()["running"] == {"a": 2, "b": 1, "c": 0}
        ledger.ended("r", "a")
        assert ledger.state()["running"] == {"a": 1, "b": 1, "c": 0}
        ledger.ended("r", "c")  # never sent there
        ledger.ended("r", "b")
        ledger.ended("r", "a")
        assert is_empty(ledger)

    def test_requests_of_other_routers_count(self) -> None:
        ledger = ledger_of()
        ledger.reported("a", 5)
        ledger.reported("gone", 5)
        assert ledger.keeper.fleet.in_flight.tolist() == [5, 0, 0]
        assert ledger.choose("1", Request())[0].worker_id != "a"

    def test_states_of_the_process(self) -> None:
        ledger = open_ledger("app/Decode", {})
        assert states()["app/Decode"]["requests"] == 0
        del ledger
        assert "app/Decode" not in states()


EVENTS = st.tuples(st.integers(0, 5), st.integers(0, 8), st.sampled_from("abcd"))


@given(st.lists(EVENTS, max_size=60))
def test_nothing_is_left_whatever_the_order(events: list[tuple[int, int, str]]) -> None:
    """Requests are chosen, sent somewhere or dropped, and end, while replicas come and go; then all end."""
    ledger = ledger_of()
    waiting: list[str] = []
    sent: list[tuple[str, str]] = []
    for number, (kind, which, replica) in enumerate(events):
        if kind <= 1 and ledger.keeper.members:
            ledger.choose(str(number), Request("", which), tried=[replica])
            waiting.append(str(number))
        elif kind == 2 and waiting:
            ledger.sent(waiting.pop(which % len(waiting)), f"r{which}", replica)
            sent.append((f"r{which}", replica))
        elif kind == 3 and sent:
            ledger.ended(*sent.pop(which % len(sent)))
        elif kind == 4 and waiting:
            ledger.dropped(waiting.pop(which % len(waiting)))
        elif kind == 5:
            ledger.keeper.follow({name: 2 for name in "abc" if name != replica})
            ledger.died(replica)
        assert len(ledger.keeper.requests) == len(waiting) + len(sent)
    for attempt in waiting:
        ledger.dropped(attempt)
    for request, replica in sent:
        ledger.ended(request, replica)
    assert is_empty(ledger)
