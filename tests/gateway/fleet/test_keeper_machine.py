"""The keeper against a simple model: workers join, leave and come back, messages come in any order and twice."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from books import check_keeper
from coterie.errors import ConfigError, UnavailableError
from coterie.gateway.fleet.keeper import FleetKeeper
from coterie.gateway.fleet.spec import RouterSpec
from coterie.routing import Request, routers
from routing_cases import COST, LAYERS, WORKERS, draw, fitted

NAMES = sorted(name for name in routers if name not in ("domain", "semantic"))
FOOTPRINTS = draw(8, 3).prefill

workers = st.sampled_from([f"w{number}" for number in range(WORKERS + 3)])
requests = st.sampled_from([f"r{number}" for number in range(12)])
wanted = st.builds(
    Request,
    prompt_tokens=st.integers(0, 999) | st.sampled_from([-1, 10**30, 2**41]),
    footprint=st.none()
    | st.sampled_from(list(FOOTPRINTS))
    | st.sampled_from([np.full((LAYERS, 8), np.nan), np.ones((2, 2)), np.zeros(3), -FOOTPRINTS[0]]),
    cached_tokens=st.none() | st.integers(0, 12).map(lambda rows: np.full(rows, 50)),
)


def context() -> dict[str, object]:
    """Fitted once, when a test runs: collecting the tests must not fit anything."""
    return {"fitted": fitted(), "cost": COST}


class KeeperMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.keeper = FleetKeeper(RouterSpec(router="latency_aware"), context())
        self.open: dict[str, bool] = {}
        self.rows: dict[str, int] = {}
        """Worker → row it has, or had last."""
        self.running: dict[str, tuple[int, int]] = {}
        """Request → row, tokens."""

    @rule(worker=workers, places=st.integers(1, 4), speed=st.sampled_from([0.5, 1.0, 2.0]))
    def join(self, worker: str, places: int, speed: float) -> None:
        row = self.keeper.join(worker, places, speed)
        others = {self.rows[one] for one in self.open if one != worker}
        assert row not in others
        if worker in self.open:
            assert row == self.rows[worker]
        elif worker in self.rows:
            taken = any(there == self.rows[worker] and one != worker for one, there in self.rows.items())
            assert row == self.rows[worker] or taken or self.rows[worker] >= self.keeper.rows
        self.rows = {one: at for one, at in self.rows.items() if at != row} | {worker: row}
        self.open.setdefault(worker, True)
        assert self.keeper.fleet.places[row] == places
        assert self.keeper.fleet.speeds[row] == speed

    @rule(worker=workers)
    def leave(self, worker: str) -> None:
        assert (worker in self.keeper.members) == (worker in self.open)
        if worker in self.open:
            self.keeper.leave(worker)
            del self.open[worker]

    @precondition(lambda self: self.open)
    @rule(data=st.data(), open=st.booleans())
    def set_open(self, data: st.DataObject, open: bool) -> None:
        worker = data.draw(st.sampled_from(sorted(self.open)))
        self.keeper.set_open(worker, open)
        self.open[worker] = open

    @rule(request=requests, asked=wanted, exclude=st.sets(workers, max_size=2) | st.sets(workers))
    def route(self, request: str, asked: Request, exclude: set[str]) -> None:
        if request in self.running and self.worker_at(self.running[request][0]) not in exclude:
            row = self.keeper.route(request, asked, ()).row
            assert row == self.running[request][0]
            return
        if not self.open:
            with pytest.raises(UnavailableError):
                self.keeper.route(f"new-{request}", asked, exclude)
            return
        if request in self.running and not self.told(request, exclude):
            return
        choice = self.keeper.route(request, asked, exclude)
        assert choice.worker_id in self.open
        assert choice.row == self.rows[choice.worker_id]
        assert choice.decision.worker == choice.row
        allowed = [one for one, open in self.open.items() if open and one not in exclude]
        allowed = allowed or [one for one in self.open if one not in exclude] or list(self.open)
        assert choice.worker_id in allowed
        assert (choice.fallback == "all_excluded") == (set(self.open) <= exclude)
        tokens = asked.prompt_tokens if 0 <= asked.prompt_tokens <= 999 else 0
        self.running[request] = (choice.row, tokens)

    def worker_at(self, row: int) -> str | None:
        return next((one for one in self.open if self.rows[one] == row), None)

    def told(self, request: str, exclude: set[str]) -> bool:
        """Whether the worker that the keeper was told of is excluded; its row may have another since."""
        known = self.keeper.requests[request].worker_id
        return known in exclude

    @rule(request=requests)
    def finish(self, request: str) -> None:
        assert self.keeper.finish(request) == (request in self.running)
        self.running.pop(request, None)

    @rule(request=requests)
    def computed(self, request: str) -> None:
        """Its prompt is computed; a request that has ended says so too."""
        self.keeper.computed(request)
        if request in self.running:
            assert self.keeper.fleet._residents[request].uncomputed == 0

    @precondition(lambda self: self.open)
    @rule(data=st.data(), at_worker=st.integers(0, 20))
    def report(self, data: st.DataObject, at_worker: int) -> None:
        row = self.rows[data.draw(st.sampled_from(sorted(self.open)))]
        peak, own = int(self.keeper.fleet.peak[row]), int(self.keeper.fleet.running[row])
        self.keeper.fleet.observe(row, at_worker)
        assert self.keeper.fleet.in_flight[row] == own + max(0, at_worker - peak)

    @rule(name=st.sampled_from(NAMES))
    def reload(self, name: str) -> None:
        self.keeper.reload(RouterSpec(router=name), context())
        self.rows = {one: row for one, row in self.rows.items() if row < self.keeper.rows}

    @rule(spec=st.sampled_from([RouterSpec(router="nobody"), RouterSpec(router="joint:kv=much")]))
    def reload_what_cannot_be_made(self, spec: RouterSpec) -> None:
        before = self.keeper.spec, self.keeper.fleet
        with pytest.raises(ConfigError, match="cannot be made"):
            self.keeper.reload(spec)
        assert (self.keeper.spec, self.keeper.fleet) == before

    @invariant()
    def counts_are_the_model_s(self) -> None:
        keeper = self.keeper
        check_keeper(keeper)
        assert len(keeper.requests) == len(self.running)
        counts = Counter(row for row, _ in self.running.values())
        assert keeper.fleet.running.tolist() == [counts[row] for row in range(keeper.rows)]
        tokens: Counter[int] = Counter()
        for row, each in self.running.values():
            tokens[row] += each
        assert keeper.fleet.context_tokens.tolist() == [tokens[row] for row in range(keeper.rows)]
        assert {one for one in keeper.ids if one is not None} == set(self.open)
        assert all(keeper.members[one].open == open for one, open in self.open.items())

    def teardown(self) -> None:
        for request in list(self.running):
            assert self.keeper.finish(request)
        assert not self.keeper.fleet.running.any()
        assert not self.keeper.fleet._logs.any()
        check_keeper(self.keeper)


TestKeeper = KeeperMachine.TestCase
TestKeeper.settings = settings(max_examples=30, stateful_step_count=40, deadline=None)
