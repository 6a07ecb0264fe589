"""The waiting list against a plain model of it: nothing lost, nobody starved, peek and pop agree."""

from __future__ import annotations

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from coterie.batching import strategies
from coterie.batching.base import SpreadCost
from coterie.batching.waiting.choosing import Chooser, WindowChoice
from waiting_engine import Engine, Request, waiting_list


def ranked(request: Request) -> tuple[int, int]:
    return request.priority, request.number


class WaitingMachine(RuleBasedStateMachine):
    """Whatever an engine may do, in any order."""

    @initialize(
        strategy=st.sampled_from(["greedy_variance", "random", "greedy_dot_product", "lpt", "power_of_d"]),
        window=st.integers(1, 6),
        batch=st.integers(1, 4),
        skips=st.integers(1, 3),
        by_priority=st.booleans(),
        seed=st.integers(0, 3),
    )
    def begin(self, strategy: str, window: int, batch: int, skips: int, by_priority: bool, seed: int) -> None:
        self.engine = Engine()
        self.limit, self.by_priority = skips, by_priority
        self.chooser = Watched(
            strategies.make(strategy, {"cost": SpreadCost()}, max_skips=skips),
            self.engine,
            np.random.default_rng(seed),
            window_size=window,
            batch_size=batch,
            report=self.engine.report,
        )
        self.chooser.machine = self
        self.waiting = waiting_list(self.chooser, rank=ranked if by_priority else None)
        self.model: list[Request] = []  # as they wait, urgent ones aside
        self.stopped: list[Request] = []
        self.out: list[Request] = []
        self.count = 0
        self.age: dict[Request, int] = {}
        self.taken_now: set[Request] = set()
        self.front = 0

    def sort(self) -> None:
        for requests in (self.model, self.stopped):
            requests.sort(key=ranked if self.by_priority else self.age.__getitem__)

    def to_the_front(self, request: Request) -> None:
        self.front -= 1
        self.age[request] = self.front

    def best(self) -> int:
        return min((r.priority for r in [*self.model, *self.stopped]), default=0)

    @rule(priority=st.integers(0, 2))
    def arrive(self, priority: int) -> None:
        request = Request(self.count, priority if self.by_priority else 0)
        self.count += 1
        self.age[request] = self.count
        self.waiting.push(request)
        self.model.append(request)
        self.sort()

    @precondition(lambda self: self.model or self.stopped)
    @rule()
    def take(self) -> None:
        shown = self.waiting.peek()
        assert self.waiting.peek() is shown
        got = self.waiting.pop()
        assert got is shown
        assert got.priority == self.best(), "a lower class never goes first"
        urgent = [r for r in self.stopped if r.priority == self.best()]
        if urgent:
            assert got is urgent[0], "what was stopped goes first"
            self.stopped.remove(got)
        else:
            self.model.remove(got)
        self.out.append(got)
        self.engine.runs.append(got)
        self.taken_now.add(got)
        got.stopped = False

    @precondition(lambda self: self.engine.runs)
    @rule(at=st.integers(0, 20))
    def finish(self, at: int) -> None:
        self.engine.runs.pop(at % len(self.engine.runs))

    @precondition(lambda self: self.engine.runs)
    @rule()
    def stop(self) -> None:
        request = self.engine.runs.pop()
        request.stopped = True
        self.waiting.prepend(request)
        self.out.remove(request)
        self.taken_now.discard(request)
        self.to_the_front(request)
        self.stopped.append(request)
        self.sort()

    @precondition(lambda self: self.engine.runs)
    @rule()
    def put_back(self) -> None:
        """Looked at and not started: in the same step it goes back to its place, later to the front."""
        request = self.engine.runs.pop()
        self.waiting.prepend(request)
        self.out.remove(request)
        if request not in self.taken_now:
            self.to_the_front(request)
        self.taken_now.discard(request)
        self.model.append(request)
        self.sort()

    @precondition(lambda self: self.model or self.stopped)
    @rule(at=st.integers(0, 50), twice=st.booleans())
    def abort(self, at: int, twice: bool) -> None:
        requests = [*self.model, *self.stopped]
        request = requests[at % len(requests)]
        self.waiting.remove([request, request] if twice else [request])
        (self.model if request in self.model else self.stopped).remove(request)
        self.out.append(request)

    @precondition(lambda self: self.model)
    @rule(at=st.integers(0, 50))
    def block_or_free(self, at: int) -> None:
        request = self.model[at % len(self.model)]
        request.blocked = not request.blocked
        self.waiting.refresh()
        self.taken_now.clear()

    @rule()
    def step(self) -> None:
        self.waiting.refresh()
        self.taken_now.clear()

    @rule(how=st.sampled_from(["known", "unknown", "broken"]))
    def predictor(self, how: str) -> None:
        self.engine.known, self.engine.broken = how == "known", how == "broken"

    @invariant()
    def holds_what_it_was_given(self) -> None:
        if not hasattr(self, "waiting"):
            return
        assert self.engine.failures == self.chooser.counters.failures, "no other failure than the predictor's"
        there = list(self.waiting)
        assert len(there) == len(self.waiting) == len(self.model) + len(self.stopped)
        assert set(there) == {*self.model, *self.stopped}
        assert [r for r in there if not r.stopped] == self.model
        assert not set(there) & {*self.out, *self.engine.runs}
        assert len(set(self.out)) == len(self.out), "handed out once"
        assert all(self.waiting.skips(r) <= self.limit for r in there), "nobody is passed over more often"
        assert self.chooser.counters.worst_skips <= self.limit
        assert set(self.waiting.upcoming()) == set(there)


class Watched(Chooser[Request]):
    """Holds each window against the model."""

    machine: WaitingMachine

    def choose(
        self, queue: str, window: list[Request], skips: list[int], queued: int, size: int
    ) -> WindowChoice | None:
        model = self.machine.model
        best = min(r.priority for r in model)
        could = [r for r in model if r.priority == best and not r.blocked]
        assert window == could[: self.window_size], "the oldest that could run"
        assert queued == sum(r.priority == best for r in model), "of the same class, the urgent aside"
        chosen = super().choose(queue, window, skips, queued, size)
        assert chosen is None or chosen.order[0] == 0, "the oldest is in, and first"
        return chosen


TestWaiting = WaitingMachine.TestCase
TestWaiting.settings = settings(max_examples=100, stateful_step_count=50, deadline=None)
