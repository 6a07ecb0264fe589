"""The keeper under attack: broken routers, requests that lie."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import pytest

from books import check_keeper
from coterie.errors import UnavailableError
from coterie.gateway.fleet.keeper import FleetKeeper
from coterie.gateway.fleet.spec import Made, RouterSpec
from coterie.routing import Decision, Fleet, Request, routers
from routing_cases import COST, EXPERTS, LAYERS, WORKERS, draw, fitted

FOOTPRINTS = draw(4, 1).prefill


def state(keeper: FleetKeeper) -> dict[str, Any]:
    """All that a decision may read of the fleet. The peak of requests is of the past, whatever ended since."""
    kept = ("_residents", "peak", "heard")
    values = {name: value for name, value in vars(keeper.fleet).items() if name not in kept}
    heard = {f"heard {name}": value for name, value in keeper.fleet.heard._asdict().items()}
    return {name: np.copy(value) for name, value in (values | heard).items()}


class Broken:
    """A router that does what a test wants."""

    def __init__(self, does: Callable[[Request, Fleet], Any]) -> None:
        self.does: Callable[[Request, Fleet], Any] | None = does
        self.plain = routers.make("join_shortest_queue")

    def route(self, request: Request, fleet: Fleet) -> Decision:
        if request.id != "bad" or self.does is None:
            return self.plain.route(request, fleet)
        found: Decision = self.does(request, fleet)
        return found


def raising(error: BaseException) -> Callable[[Request, Fleet], Any]:
    def does(_request: Request, _fleet: Fleet) -> Any:
        raise error

    return does


def giving(worker: Any, scores: Any = None, profile: Any = None) -> Callable[[Request, Fleet], Any]:
    return lambda _, fleet: Decision(worker, np.zeros(len(fleet)) if scores is None else scores, "", profile)


def admitting(_request: Request, fleet: Fleet) -> Decision:
    fleet.admit("bad", 0, 5)
    fleet.alive[:] = False
    return Decision(0, np.zeros(len(fleet)), "")


BROKEN: Mapping[str, tuple[Callable[[Request, Fleet], Any], str]] = {
    "value error": (raising(ValueError("the request's text")), "router_error"),
    "recursion": (raising(RecursionError()), "router_error"),
    "memory": (raising(MemoryError()), "router_error"),
    "unavailable": (raising(UnavailableError("none is alive")), "router_error"),
    "no decision": (lambda _request, _fleet: None, "bad_decision"),
    "a tuple": (lambda _request, _fleet: (0, np.zeros(3), ""), "bad_decision"),
    "a name": (giving("w0"), "bad_decision"),
    "a fraction": (giving(0.5), "bad_decision"),
    "below 0": (giving(-1), "bad_choice"),
    "past the end": (giving(99), "bad_choice"),
    "beyond any": (giving(10**9000), "bad_choice"),
    "closed": (giving(1), "bad_choice"),
    "excluded": (giving(2), "bad_choice"),
    "empty row": (giving(4), "bad_choice"),
    "scores of another fleet": (giving(0, np.zeros(2)), "bad_decision"),
    "scores in a list": (giving(0, [0.0]), "bad_decision"),
    "a profile without experts": (giving(0, None, np.zeros(7, np.float32)), "router_error"),
    "a profile that is text": (giving(0, None, "all"), "router_error"),
    "admits, and closes all": (admitting, "bad_choice"),
}


@pytest.mark.parametrize("what", BROKEN)
def test_a_broken_router_falls_back_to_the_shortest_queue(what: str) -> None:
    does, reason = BROKEN[what]
    keeper = FleetKeeper(lambda pool: Made("broken", Broken(does), Fleet([1] * pool.rows)))
    for number in range(5):
        keeper.join(f"w{number}", 4)
    keeper.leave("w4")
    keeper.set_open("w1", False)
    keeper.route("there", Request("good", 10), exclude=["w2", "w3"])
    before = state(keeper)
    choice = keeper.route("bad", Request("bad", 10), exclude=["w2"])
    assert choice.worker_id == "w3", "the only open one left with nothing to do"
    assert choice.fallback in ((None, "router_error") if reason == NOT_CHECKED else (reason,))
    assert keeper.fallbacks == {reason: 1}
    assert "text" not in choice.decision.reason
    check_keeper(keeper)
    assert keeper.finish("bad")
    after = state(keeper)
    for name in before.keys() - {"routed", "in_round"}:
        np.testing.assert_array_equal(before[name], after[name], err_msg=name)


def test_an_interrupt_is_no_router_s_error() -> None:
    keeper = FleetKeeper(lambda pool: Made("broken", Broken(raising(KeyboardInterrupt())), Fleet([1] * pool.rows)))
    keeper.join("w0", 4)
    with pytest.raises(KeyboardInterrupt):
        keeper.route("bad", Request("bad"))


NOT_CHECKED = "not checked here"
"""Footprints are checked at the wire: one that is wrong all the same is served, by the router or without it."""
STRANGE: Mapping[str, tuple[dict[str, Any], str]] = {
    "nan": ({"footprint": np.full((LAYERS, EXPERTS), np.nan)}, NOT_CHECKED),
    "one nan": ({"footprint": np.where(np.eye(LAYERS, EXPERTS) > 0, np.nan, 1.0)}, NOT_CHECKED),
    "infinite": ({"footprint": np.full((LAYERS, EXPERTS), np.inf)}, NOT_CHECKED),
    "too large a float": ({"footprint": np.full((LAYERS, EXPERTS), 1e300)}, NOT_CHECKED),
    "negative": ({"footprint": np.full((LAYERS, EXPERTS), -1)}, NOT_CHECKED),
    "large": ({"footprint": np.full((LAYERS, EXPERTS), 2**62)}, NOT_CHECKED),
    "huge": ({"footprint": np.full((LAYERS, EXPERTS), 2**64 - 1, np.uint64)}, NOT_CHECKED),
    "flat": ({"footprint": np.zeros(LAYERS * EXPERTS)}, NOT_CHECKED),
    "empty": ({"footprint": np.zeros((0, EXPERTS))}, NOT_CHECKED),
    "complex": ({"footprint": np.zeros((LAYERS, EXPERTS), complex)}, NOT_CHECKED),
    "objects": ({"footprint": np.full((LAYERS, EXPERTS), None)}, NOT_CHECKED),
    "list": ({"footprint": [[1] * EXPERTS] * LAYERS}, NOT_CHECKED),
    "another model's": ({"footprint": np.ones((LAYERS, EXPERTS + 1), np.int64)}, "router_error"),
    "turned": ({"footprint": np.ones((EXPERTS, LAYERS), np.int64)}, "router_error"),
    "ghost": ({"prompt_tokens": 10**30}, "bad_tokens"),
    "printless": ({"prompt_tokens": 10**9000}, "bad_tokens"),
    "negative tokens": ({"prompt_tokens": -1}, "bad_tokens"),
    "nan tokens": ({"prompt_tokens": float("nan")}, "bad_tokens"),
    "text": ({"prompt_tokens": "12"}, "bad_tokens"),
    "no tokens": ({"prompt_tokens": None}, "bad_tokens"),
    "cached nan": ({"cached_tokens": np.full(WORKERS, np.nan)}, "bad_cached_tokens"),
    "cached square": ({"cached_tokens": np.zeros((WORKERS, WORKERS), np.int64)}, "bad_cached_tokens"),
    "cached list": ({"cached_tokens": [1, 2]}, "bad_cached_tokens"),
}


@pytest.mark.parametrize("name", ["latency_aware", "locality_band", "pressure"])
@pytest.mark.parametrize("what", STRANGE)
def test_a_strange_request_is_served_and_leaves_no_trace(name: str, what: str) -> None:
    values, reason = STRANGE[what]
    keeper = FleetKeeper(RouterSpec(router=name), {"fitted": fitted(), "cost": COST})
    for number in range(3):
        keeper.join(f"w{number}", 4)
    keeper.route("there", Request("", 10, FOOTPRINTS[0]))
    before = state(keeper)
    choice = keeper.route("strange", Request("", **{"prompt_tokens": 100, **values}))
    assert choice.fallback in ((None, "router_error") if reason == NOT_CHECKED else (reason,))
    assert choice.worker_id in keeper.members
    check_keeper(keeper)
    assert keeper.finish("strange")
    after = state(keeper)
    if choice.fallback is not None:  # otherwise it is learned from, as any request
        for one in before.keys() - {"routed", "in_round", "_mean", "expected", "distinct", "missed"}:
            np.testing.assert_array_equal(before[one], after[one], err_msg=one)
    assert keeper.route("next", Request("", 100, FOOTPRINTS[1])).fallback is None
