"""A plan's minutes before against its minutes after."""

from __future__ import annotations

import numpy as np
import pytest

from coterie.control.before_after import FEWEST, MOST, BeforeAfter, PlanMeasured
from coterie.control.switchback import Totals


class Pool:
    """Totals of a pool whose minutes have a TPOT drawn around a mean."""

    def __init__(self, seed: int) -> None:
        self.rng, self.now_s, self.totals, self.watch = np.random.default_rng(seed), 0.0, Totals(), BeforeAfter()
        self.plans = self.drifts = 0

    def minutes(self, count: int, tpot_s: float, tokens: float = 6000.0) -> PlanMeasured | None:
        for _ in range(count):
            each_s = tpot_s * float(self.rng.lognormal(0, 0.05))
            for _ in range(60):
                self.watch.tick(self.now_s, self.totals, self.plans, self.drifts)
                self.now_s += 1.0
                came = tokens / 60
                more = self.totals._replace(seconds=self.totals.seconds + 1, tokens=self.totals.tokens + came)
                self.totals = more._replace(decoding_s=more.decoding_s + came * each_s)
        self.watch.tick(self.now_s, self.totals, self.plans, self.drifts)
        return self.watch.measured()


def test_intervals_hold_the_change() -> None:
    held = 0
    for seed in range(60):
        pool = Pool(seed)
        assert pool.minutes(20, 0.020) is None, "no plan, nothing to tell"
        pool.plans += 1
        found = pool.minutes(20, 0.018)
        assert found is not None
        assert found.minutes[0] == 20
        assert found.percent < 0
        held += found.low <= -10.0 <= found.high
    assert held >= 54, "95% intervals of 60"


def test_what_else_changed_is_told() -> None:
    pool = Pool(1)
    pool.drifts = 3
    pool.minutes(MOST + 10, 0.02)
    pool.plans += 1
    pool.minutes(2, 0.02, tokens=9000.0)
    pool.drifts += 2
    found = pool.minutes(8, 0.02, tokens=9000.0)
    assert found is not None
    assert found.minutes[0] == MOST
    assert found.load_percent == pytest.approx(50.0, abs=1.0)
    assert found.drifts == 2
    assert "drifted 2 times" in found.sentence


def test_few_minutes_say_nothing_and_a_new_plan_begins_anew() -> None:
    pool = Pool(2)
    pool.minutes(FEWEST - 1, 0.02)
    pool.plans += 1
    assert pool.minutes(20, 0.02) is None, "too few before"
    pool.plans += 1
    assert pool.minutes(2, 0.01) is None, "too few after"
    found = pool.minutes(10, 0.01)
    assert found is not None
    assert found.percent == pytest.approx(-50, abs=10)


def test_idle_minutes_do_not_count() -> None:
    pool = Pool(3)
    pool.minutes(10, 0.02)
    pool.plans += 1
    pool.minutes(10, 0.02)
    for _ in range(600):
        pool.now_s += 1.0
        pool.watch.tick(pool.now_s, pool.totals, pool.plans, 0)
    found = pool.watch.measured()
    assert found is not None
    assert found.minutes[1] <= 11
