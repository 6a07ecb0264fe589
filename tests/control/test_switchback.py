"""Turns between a router and the shortest queue: what is bet, decided and said, by a clock that the test moves."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from coterie.control.switchback import BETS, Switchback, SwitchbackSettings, Totals, lowest
from coterie.errors import ConfigError

LOGS = st.lists(st.floats(-3, 3).filter(lambda one: abs(one) > 1e-6), min_size=1, max_size=9)


@given(LOGS)
def test_no_strategy_wins_on_signs_that_are_drawn(logs: list[float]) -> None:
    """Over all ways to draw the signs, the mean stake stays 1, and few ways tell the centre from 0."""
    ways = np.array([[sign * log for sign, log in zip(signs, logs, strict=True)] for signs in _signs(len(logs))])
    stakes = (1 + np.tanh(BETS[:, None, None] * ways)).prod(axis=2).mean(axis=0)
    assert stakes.mean() == pytest.approx(1, rel=1e-9)
    error = 0.1
    assert np.mean([lowest(way, error) > 0 for way in ways]) <= error
    for way, stake in zip(ways, stakes, strict=True):
        if abs(stake * error - 1) > 1e-6:
            assert (lowest(way, error) > 0) == (stake > 1 / error)


def _signs(count: int) -> list[tuple[int, ...]]:
    return list(itertools.product((-1, 1), repeat=count))


@given(LOGS, st.floats(-2, 2), st.floats(0.01, 0.3))
def test_the_interval_moves_with_the_differences(logs: list[float], shift: float, error: float) -> None:
    ratios = np.array(logs)
    low = lowest(ratios, error)
    assert lowest(ratios + shift, error) == pytest.approx(low + shift, abs=1e-6)
    assert low <= ratios.max()
    assert lowest(ratios, error / 2) <= low + 1e-9, "less risk, a wider interval"


def test_few_pairs_tell_nothing() -> None:
    assert lowest(np.full(4, 5.0), 0.025) == -math.inf, "signs drawn four times are all alike once in 16"
    assert lowest(np.full(8, 5.0), 0.025) > 4


class Pool:
    """A pool whose TPOT depends on the side that routes; `tick` advances its clock by a second."""

    def __init__(self, effect: float, seed: int = 0, settings: SwitchbackSettings | None = None) -> None:
        self.turns = Switchback(settings or SwitchbackSettings(), np.random.default_rng(seed))
        self.effect, self.totals = effect, Totals()
        self.rng = np.random.default_rng([seed, 1])
        self.sides: list[bool] = []
        self.said: list[str] = []

    @property
    def state(self) -> str:
        return self.turns.state

    def tick(self, seconds: int) -> None:
        for _ in range(seconds):
            tpot = 0.01 * (1.0 if self.turns.baseline else self.effect) * math.exp(0.02 * self.rng.standard_normal())
            self.sides.append(self.turns.baseline)
            gained = Totals(1.0, 0.4, 2.0, 800 * tpot, 800.0, 700.0, 100.0)
            self.totals = Totals(*(now + more for now, more in zip(self.totals, gained, strict=True)))
            said = self.turns.tick(self.totals.seconds, self.totals)
            self.said += [] if said is None else [said]


def test_a_worse_router_is_left_and_tried_again_later() -> None:
    pool = Pool(1.2)
    pool.tick(600)
    assert pool.state == "left"
    assert pool.turns.baseline
    assert pool.said[0].startswith("TPOT was ")
    assert "the router is tried again in 60 min" in pool.said[0]
    since = len(pool.sides)
    pool.tick(3600)
    assert pool.said[1] == "the router is tried again"
    assert not all(pool.sides[since:])
    pool.effect = 0.9
    pool.tick(1200)
    assert pool.state == "watching", "it is judged by what it does now"
    pool.effect, since = 1.5, len(pool.said)
    pool.tick(2 * 3600)
    assert "5 pairs of blocks TPOT was higher" in pool.said[since], "what was good for long may have become bad"
    pool.tick(4 * 24 * 3600)
    waits = [one.rpartition("again in ")[2] for one in pool.said if "again in" in one]
    assert waits[:6] == ["60 min", "120 min", "240 min", "480 min", "960 min", "1440 min"]
    assert sum(not side for side in pool.sides[-24 * 3600 :]) < 1800, "it is hardly used any more"


def test_blocks_are_drawn_and_the_shortest_queue_gets_its_share() -> None:
    pool = Pool(1.0, settings=SwitchbackSettings(pairs=10))
    pool.tick(30)
    assert not any(pool.sides), "the router begins alone"
    pool.tick(10 * 60)
    blocks = np.array(pool.sides[30:630]).reshape(10, 2, 30)
    assert np.all(blocks == blocks[:, :, :1]), "a block has one side"
    assert np.all(blocks[:, 0, 0] != blocks[:, 1, 0]), "a pair has both"
    assert 0 < blocks[:, 0, 0].sum() < 10, "their order is drawn"
    since = len(pool.sides)
    pool.tick(20 * 600)
    assert np.mean(pool.sides[since:]) == pytest.approx(0.05, abs=0.005)


def test_what_is_said_and_measured() -> None:
    pool = Pool(0.95)
    assert pool.turns.verdict() == "no pair of blocks has been measured yet"
    pool.tick(30 + 60)
    assert pool.turns.verdict() == "1 pair of blocks: too few to tell the router from the shortest queue"
    pool.tick(19 * 60)
    tpot, experts = pool.turns.changes["tpot"], pool.turns.changes["experts"]
    assert tpot.shortest_queue == pytest.approx(0.01, rel=0.01)
    assert tpot.percent == pytest.approx(-5, abs=1)
    assert tpot.low is not None
    assert tpot.high is not None
    assert tpot.low < tpot.percent < tpot.high < 0
    assert "TPOT is " in pool.turns.verdict()
    assert "lower than by the shortest queue" in pool.turns.verdict()
    assert experts.router == pytest.approx(7)
    assert experts.percent == pytest.approx(0, abs=1e-9)
    assert pool.turns.changes["tokens"].router == pytest.approx(800)
    assert pool.turns.changes["ttft"].router == pytest.approx(0.2)


def test_what_was_measured_before_a_change_is_kept_beside_it() -> None:
    pool = Pool(0.95)
    pool.tick(1200)
    before = pool.turns.changes["tpot"]
    pool.turns.restart(pool.totals.seconds)
    assert pool.turns.before == before
    assert f"before it {before.percent:+.1f}%" in pool.turns.verdict()


def test_an_idle_pool_is_not_judged() -> None:
    turns = Switchback(SwitchbackSettings(), np.random.default_rng(0))
    for second in range(7200):
        assert turns.tick(float(second), Totals(seconds=float(second))) is None
    assert (turns.pairs, turns.verdict()) == (0, "no pair of blocks has been measured yet")


@pytest.mark.parametrize(
    ("setting", "said"),
    [
        ({"settle_s": 30.0}, "settle_s=30 must be below block_s=30"),
        ({"share": 0.6}, "share=0.6 must be above 0 and at most 0.5"),
        ({"error": 0.0}, "error=0 must be above 0"),
        ({"block_s": math.inf}, "block_s"),
        ({"pairs": 0}, "pairs=0 must be at least 1"),
    ],
)
def test_settings_that_cannot_be(setting: dict[str, float], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        SwitchbackSettings(**setting)  # type: ignore[arg-type]
