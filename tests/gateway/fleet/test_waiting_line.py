"""The waiting line against a list: first come, first served, under deadlines, cancellation and races of one turn."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from books import check_line
from coterie.errors import ConfigError
from coterie.gateway.fleet.waiting import SPARE, Refused, WaitingLine


class HandLoop(asyncio.SelectorEventLoop):
    """An event loop whose clock a test turns by hand."""

    now = 0.0

    def time(self) -> float:
        return self.now

    def settle(self) -> None:
        """Run until nothing is ready. A turn with something ready never waits for the clock."""
        for _ in range(6):
            self.run_until_complete(asyncio.sleep(0))

    def turn(self, seconds: float) -> None:
        self.now += seconds  # deadlines are multiples of 1/1024: no rounding
        self.settle()


@asynccontextmanager
async def place(line: WaitingLine, deadline_s: float) -> AsyncIterator[float]:
    """A place for as long as the block runs, as the gateway takes it."""
    waited_s = 0.0 if line.take_at_once() else await line.take(deadline_s)
    try:
        yield waited_s
    finally:
        line.give_back()


class Entered:
    """A request as the reference sees it."""

    def __init__(self, name: int, until: float) -> None:
        self.name, self.until = name, until
        self.leave = asyncio.Event()
        self.got = ""
        self.task: asyncio.Task[None] | None = None

    async def run(self, line: WaitingLine, deadline_s: float) -> None:
        try:
            async with place(line, deadline_s):
                self.got = "place"
                await self.leave.wait()
            self.got = "left"
        except Refused as error:
            self.got = error.reason
        except asyncio.CancelledError:
            self.got = "cancelled"
            raise


class LineMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.loop = HandLoop()
        self.running: list[Entered] = []
        self.waiting: list[Entered] = []
        self.all: list[Entered] = []
        self.closed = False

    @initialize(places=st.integers(2, 5), waiting=st.integers(3, 6))
    def start(self, places: int, waiting: int) -> None:
        self.line = WaitingLine(places, waiting)
        for _ in range(places):
            self.enter_one(5.0)

    def admit(self) -> None:
        while self.waiting and len(self.running) < self.line.places:
            self.running.append(self.waiting.pop(0))

    @rule(asked=st.lists(st.sampled_from([5.0, 2.0, 1.0]), min_size=3, max_size=6))
    def enter(self, asked: list[float]) -> None:
        for deadline_s in asked:
            self.enter_one(deadline_s)

    @rule()
    def enter_with_no_time(self) -> None:
        self.enter_one(0.0)

    def enter_one(self, deadline_s: float) -> None:
        deadline_s += len(self.all) / 1024 if deadline_s else 0.0  # no two pass together: the order would be open
        one = Entered(len(self.all), self.loop.now + deadline_s)
        expected = ""
        if self.closed:
            expected = "closed"
        elif not self.waiting and len(self.running) < self.line.places:
            self.running.append(one)
            expected = "place"
        elif len(self.waiting) >= self.line.most_waiting:
            expected = "full"
        elif deadline_s == 0:
            expected = "late"
        else:
            self.waiting.append(one)
        self.all.append(one)
        one.task = self.loop.create_task(one.run(self.line, deadline_s))
        self.loop.settle()
        assert one.got == expected

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def leave(self, data: st.DataObject) -> None:
        one = data.draw(st.sampled_from(self.running))
        one.leave.set()
        self.running.remove(one)
        self.admit()
        self.loop.settle()
        assert one.got == "left"

    @precondition(lambda self: self.running or self.waiting)
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        one = data.draw(st.sampled_from(self.running + self.waiting))
        assert one.task is not None
        one.task.cancel()
        (self.running if one in self.running else self.waiting).remove(one)
        self.admit()
        self.loop.settle()
        assert one.got == "cancelled"

    @precondition(lambda self: self.running and self.waiting)
    @rule(data=st.data(), first=st.booleans())
    def leave_and_cancel_in_one_turn(self, data: st.DataObject, first: bool) -> None:
        """The waiter is cancelled in the turn in which it is given the place, before it can run."""
        gone, one = data.draw(st.sampled_from(self.running)), self.waiting[0]
        assert one.task is not None
        tasks: list[Callable[[], object]] = [gone.leave.set, one.task.cancel]
        if first:
            tasks.reverse()
        for do in tasks:
            do()
        self.running.remove(gone)
        self.waiting.remove(one)
        self.admit()
        self.loop.settle()
        assert (gone.got, one.got) == ("left", "cancelled")

    @precondition(lambda self: self.waiting)
    @rule()
    def given_then_cancelled(self) -> None:
        """A place is given by hand and the waiter is cancelled at once: the place goes to the next."""
        one = self.waiting[0]
        assert one.task is not None
        places = self.line.places
        self.line.set_limits(places + 1000, self.line.most_waiting)
        one.task.cancel()
        self.line.set_limits(places, self.line.most_waiting)
        self.running += self.waiting
        self.waiting = []
        self.running.remove(one)
        self.admit()
        self.loop.settle()
        assert one.got == "cancelled"

    @precondition(lambda self: self.waiting)
    @rule(seconds=st.sampled_from([0.5, 1.0, 3.0]))
    def pass_time(self, seconds: float) -> None:
        end = self.loop.now + seconds
        while late := min((one for one in self.waiting if one.until <= end), key=lambda one: one.until, default=None):
            self.loop.turn(late.until - self.loop.now)
            self.waiting.remove(late)
            self.admit()
            assert late.got == "late"
        self.loop.turn(end - self.loop.now)

    @precondition(lambda self: len(self.all) > 20)
    @rule(places=st.integers(1, 5), waiting=st.integers(0, 6))
    def set_limits(self, places: int, waiting: int) -> None:
        self.line.set_limits(places, waiting)
        self.admit()
        self.loop.settle()

    @precondition(lambda self: len(self.all) > 60)
    @rule(refuse=st.booleans())
    def close(self, refuse: bool) -> None:
        self.line.close(refuse)
        self.closed = True
        self.loop.settle()
        if refuse:
            assert all(one.got == "closed" for one in self.waiting)
            self.waiting = []

    @invariant()
    def the_line_is_the_list(self) -> None:
        if not hasattr(self, "line"):
            return
        check_line(self.line)
        assert self.line.in_use == len(self.running)
        assert self.line.waiting == len(self.waiting)
        assert all(one.got == "place" for one in self.running), "no wake-up is lost"
        assert all(one.got == "" for one in self.waiting)
        assert 1 <= self.loop.run_until_complete(self.retry()) <= 60

    async def retry(self) -> int:
        return self.line.retry_after_s()

    def teardown(self) -> None:
        try:
            self.leave_all()
        finally:
            for one in self.all:
                assert one.task is not None
                one.task.cancel()
            self.loop.settle()
            self.loop.close()

    def leave_all(self) -> None:
        while self.running:
            for one in self.running:
                one.leave.set()
            self.running = []
            self.admit()
            self.loop.settle()
        if hasattr(self, "line"):
            assert self.line.in_use == self.line.waiting == 0
            counters, ends = self.line.counters, [one.got for one in self.all]
            for reason in ("late", "full", "closed"):
                assert counters[reason] == ends.count(reason)
            assert counters["admitted"] >= ends.count("left")


TestLine = LineMachine.TestCase
TestLine.settings = settings(max_examples=40, stateful_step_count=30, deadline=None)


def run(work: Callable[[HandLoop], Awaitable[None]]) -> None:
    loop = HandLoop()
    try:
        loop.run_until_complete(work(loop))
    finally:
        loop.close()


@pytest.mark.parametrize("how", ["cancelled", "late"])
def test_the_first_in_line_blocks_nobody_once_gone(how: str) -> None:
    async def work(loop: HandLoop) -> None:
        line = WaitingLine(1, 5)
        await line.take(1.0)
        first = asyncio.ensure_future(line.take(3.0))
        await asyncio.sleep(0)
        others = [asyncio.ensure_future(line.take(9.0)) for _ in range(2)]
        await asyncio.sleep(0)
        assert (line.in_use, line.waiting) == (1, 3)
        if how == "cancelled":
            first.cancel()
        else:
            loop.now += 3.0
        await asyncio.wait([first])
        check_line(line)
        line.give_back()
        await asyncio.wait([others[0]])
        assert [one.done() for one in others] == [True, False]
        assert (line.in_use, line.waiting) == (1, 1)
        line.give_back()
        await asyncio.wait([others[1]])
        check_line(line)
        assert isinstance(first.exception() if how == "late" else None, Refused | None)

    run(work)


def test_refusals_say_when_to_come_back() -> None:
    async def work(loop: HandLoop) -> None:
        line = WaitingLine(1, 2)
        await line.take(1.0)
        waiters = [asyncio.ensure_future(line.take(100.0)) for _ in range(2)]
        await asyncio.sleep(0)
        for _ in range(8):  # a place every two seconds
            loop.now += 2.0
            line.give_back()
            waiters.append(asyncio.ensure_future(line.take(100.0)))
            await asyncio.sleep(0)
            await asyncio.sleep(0)
        with pytest.raises(Refused, match=r"2 requests.* 6 s") as refused:
            await line.take(1.0)
        assert (refused.value.status, refused.value.retry_after_s) == (429, 6)
        loop.now += 1000.0
        assert line.retry_after_s() == 60, "it stalls"
        for waiter in waiters:
            waiter.cancel()
        await asyncio.gather(*waiters, return_exceptions=True)

    run(work)


def test_a_deadline_is_told_with_503() -> None:
    async def work(loop: HandLoop) -> None:
        line = WaitingLine(1, 5)
        await line.take(1.0)
        late = asyncio.ensure_future(line.take(3.0))
        await asyncio.sleep(0)
        loop.now += 3.0
        with pytest.raises(Refused) as refused:
            await late
        assert (refused.value.status, refused.value.retry_after_s) == (503, 1)
        line.close()
        with pytest.raises(Refused, match="shutting down") as closed:
            await line.take(1.0)
        assert closed.value.status == 503

    run(work)


def test_the_wait_is_measured_and_errors_free_the_place() -> None:
    async def work(loop: HandLoop) -> None:
        line = WaitingLine(1, 5)

        async def fails() -> None:
            async with place(line, 1.0) as waited_s:
                assert waited_s == 0.0
                await asyncio.sleep(0)
                loop.now += 0.5
                raise ValueError

        async def waits() -> float:
            async with place(line, 1.0) as waited_s:
                return waited_s

        first, second = asyncio.ensure_future(fails()), asyncio.ensure_future(waits())
        assert await second == 0.5
        assert isinstance(first.exception(), ValueError)
        assert line.in_use == 0

    run(work)


def test_clients_that_come_and_go_leave_nothing() -> None:
    """Behind a request that waits long, thousands are cancelled: they are not kept until it is served."""

    async def work(_loop: HandLoop) -> None:
        line = WaitingLine(1, 10)
        await line.take(1.0)
        first = asyncio.ensure_future(line.take(100.0))
        for _ in range(2000):
            gone = asyncio.ensure_future(line.take(100.0))
            await asyncio.sleep(0)
            gone.cancel()
            await asyncio.sleep(0)
        assert line.waiting == 1
        assert len(line._line) <= 2 * line.waiting + SPARE + 1
        line.give_back()
        assert await first == 0.0
        assert line.counters["cancelled"] == 2000

    run(work)


def test_a_coroutine_that_is_closed_leaves_the_line() -> None:
    async def work(_loop: HandLoop) -> None:
        line = WaitingLine(1, 3)
        await line.take(1.0)
        waits = line.take(5.0)
        waits.send(None)
        assert line.waiting == 1
        waits.close()
        assert (line.in_use, line.waiting) == (1, 0)

    run(work)


def test_wrong_settings() -> None:
    async def work(_loop: HandLoop) -> None:
        for places, waiting in ((0, 1), (1, -1)):
            with pytest.raises(ConfigError):
                WaitingLine(places, waiting)
        line = WaitingLine(1, 1)
        for deadline_s in (-1.0, float("inf"), float("nan")):
            with pytest.raises(ConfigError):
                await line.take(deadline_s)
        assert line.in_use == 0

    run(work)
