from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from books import check_fleet
from coterie.errors import ConfigError
from coterie.routing import Fleet
from coterie.routing.fleet import MOST_CERTAIN, PRIOR_WINDOW, UNIT, _logs, _spread


def profile(rng: np.random.Generator, size: int) -> np.ndarray:
    return rng.uniform(0, 0.9, size).astype(np.float32)


def recount(residents: dict[str, tuple[int, np.ndarray]], fleet: Fleet, worker: int, prior: np.ndarray) -> np.ndarray:
    """[expert index] what `missed` must be, from its definition, if none has left yet."""
    profiles = list(residents.values())
    prior = prior.astype(np.float64)
    for where, p in profiles:
        if where == worker:
            prior += (p - prior) / PRIOR_WINDOW
    mine = [np.log1p(-p) for where, p in profiles if where == worker]
    expected = (len(mine) + fleet.running.mean()) / 2
    mean = (np.mean(mine, axis=0) + np.log1p(-prior)) / 2 if mine else np.log1p(-prior)
    missed: np.ndarray = np.exp(expected * mean)
    return missed


@given(st.integers(1, 5), st.lists(st.tuples(st.booleans(), st.integers(0, 99)), max_size=40), st.integers(0, 99))
def test_counts_are_those_of_who_is_there(workers: int, actions: list[tuple[bool, int]], seed: int) -> None:
    rng, size = np.random.default_rng(seed), 6
    fleet = Fleet([8] * workers, np.full((workers, size), 0.2))
    residents: dict[Any, Any] = {}
    for number, (comes, which) in enumerate(actions):
        if comes or not residents:
            one = profile(rng, size)
            residents[f"r{number}"] = (which % workers, one)
            fleet.admit(f"r{number}", which % workers, which, one)
        else:
            name = sorted(residents)[which % len(residents)]
            del residents[name]
            fleet.finish(name)
    places = [where for where, _ in residents.values()]
    assert fleet.running.tolist() == np.bincount(places, minlength=workers).tolist()
    assert (fleet.context_tokens >= 0).all()
    assert fleet.context_tokens.any() or not any(
        which for number, (_, which) in enumerate(actions) if f"r{number}" in residents
    )


@given(st.integers(2, 5), st.integers(1, 12), st.integers(0, 99))
def test_missed_follows_its_definition(workers: int, requests: int, seed: int) -> None:
    rng, size = np.random.default_rng(seed), 5
    fleet = Fleet([8] * workers, np.full((workers, size), 0.2))
    residents: dict[Any, Any] = {}
    for number in range(requests):
        one = profile(rng, size)
        residents[f"r{number}"] = (int(rng.integers(workers)), one)
        fleet.admit(f"r{number}", residents[f"r{number}"][0], 0, one)
    fleet._mean = -1.0  # all are made anew, as after a large change
    fleet._shift(0, None, 0)
    for every in range(workers):
        right = recount(residents, fleet, every, np.full(size, 0.2))
        assert np.abs(fleet.missed[every] / 255 - right).max() < 0.006
        assert fleet.distinct[every] == pytest.approx((1 - right).sum(), abs=1e-3)


@given(st.lists(st.tuples(st.integers(0, 2), st.integers(0, 99)), max_size=60), st.integers(0, 99))
def test_nobody_left_leaves_nothing_behind(actions: list[tuple[int, int]], seed: int) -> None:
    """Whoever came and went in between: not even rounding."""
    rng, size = np.random.default_rng(seed), 7
    fleet = Fleet([4, 4, 4], np.full((3, size), 0.2))
    there: list[Any] = []
    for number, (action, which) in enumerate(actions):
        if action < 2 or not there:
            there.append(f"r{number}")
            fleet.admit(f"r{number}", which % 3, 10, profile(rng, size) if which % 5 else None)
        else:
            fleet.finish(there.pop(which % len(there)))
    if there:
        fleet.finish(there.pop(0))
    for one in there:
        fleet.finish(one)
    assert not fleet.running.any()
    assert not fleet.context_tokens.any()
    assert not fleet._profiled.any()
    assert not fleet._logs.any()
    assert (fleet.missed == 255).all()
    assert not fleet.distinct.any()


def test_logarithms_are_right_to_a_unit() -> None:
    p = np.concatenate([np.linspace(0, 1, 5001), np.logspace(-8, 0, 999), [-0.1, 1.1]]).astype(np.float32)
    right = np.log1p(-np.clip(p.astype(np.float64), 0, np.float32(MOST_CERTAIN)))
    assert np.abs(_logs(p) * UNIT - right).max() < UNIT


@given(st.floats(0, 40), st.integers(0, 99))
def test_what_is_missed_is_rounded_right(load: float, seed: int) -> None:
    rng, size = np.random.default_rng(seed), 100
    logs, prior = (rng.integers(-7 * 2**16, 1, (2, size)) * (rng.random(size) ** 4)).astype(np.int32)
    missed = np.empty(size, np.uint8)
    distinct = _spread(logs, prior, load / 3, load / 2, missed)
    right = np.exp(UNIT * (load / 3 * logs + load / 2 * prior))
    assert np.abs(missed - 255 * right).max() < 0.501
    assert distinct == pytest.approx((1 - right).sum(), abs=1e-3)


def test_a_full_fleet_is_open_to_all_who_live() -> None:
    fleet = Fleet([1, 1, 1])
    fleet.admit("a", 0)
    assert fleet.open.tolist() == [False, True, True]
    fleet.alive[2] = False
    fleet.admit("b", 1)
    assert fleet.open.tolist() == [True, True, False]


def test_an_empty_worker_has_its_prior_character() -> None:
    prior = np.zeros((2, 4), np.float32)
    prior[0, :2] = 0.5
    prior[1, 2:] = 0.5
    fleet = Fleet([4, 4], prior)
    fleet.admit("a", 0, 0, np.full(4, 0.3, np.float32))
    assert fleet.missed[1, 0] == 255
    assert fleet.missed[1, 2] < 255


def test_mistakes_are_told() -> None:
    fleet = Fleet([1, 2], np.zeros((2, 3)))
    fleet.admit("a", 0, 0, np.zeros(3, np.float32))
    for wrong in (
        lambda: fleet.admit("a", 1),
        lambda: fleet.admit("b", 2),
        lambda: fleet.finish("c"),
        lambda: fleet.admit("d", 0, 0, np.zeros(2, np.float32)),
        lambda: Fleet([]),
        lambda: Fleet([0]),
        lambda: Fleet([1], speeds=[0.0]),
        lambda: Fleet([1], speeds=[1.0, 1.0]),
        lambda: Fleet([1], np.zeros((2, 3))),
        lambda: Fleet([1]).admit("a", 0, 0, np.zeros(3, np.float32)),
    ):
        with pytest.raises(ConfigError):
            wrong()
    assert fleet.running.tolist() == [1, 0]


@pytest.mark.parametrize(
    ("context", "profile"),
    [
        (10**30, None),
        (10**9000, None),
        (-1, None),
        (1.5, None),
        ("9", None),
        (0, np.array([0.1, np.nan], np.float32)),
        (0, np.array([0.1, np.inf], np.float32)),
        (0, np.array([0.1, 1e30], np.float32)),
        (0, np.array([0.1, -3.0], np.float32)),
        (0, np.array([[0.1], [0.2]], np.float32)),
        (10**30, np.array([0.1, 0.2], np.float32)),
    ],
    ids=str.split("huge printless negative fraction text nan infinite large below-0 shape huge-with-profile"),
)
def test_what_is_refused_leaves_no_trace(context: Any, profile: np.ndarray | None) -> None:
    fleet = Fleet([4, 4], np.full((2, 2), 0.2))
    fleet.admit("there", 1, 7, np.array([0.3, 0.4], np.float32))
    before = {name: np.copy(value) for name, value in vars(fleet).items() if name not in ("_residents", "heard")}
    with pytest.raises((ConfigError, TypeError)):
        fleet.admit("new", 1, context, profile)
    for name, value in before.items():
        np.testing.assert_array_equal(getattr(fleet, name), value, err_msg=name)
    check_fleet(fleet)
    fleet.admit("new", 1, 3)
    fleet.finish("new")


@given(st.lists(st.tuples(st.integers(0, 2), st.booleans(), st.integers(0, 99)), max_size=20), st.integers(0, 99))
def test_a_fleet_takes_over_another(requests: list[tuple[int, bool, int]], seed: int) -> None:
    """With one row more and the same priors, the values are those of a fleet that got the same requests itself."""
    rng, prior = np.random.default_rng(seed), np.full((4, 5), 0.2, np.float32)
    old, same, plain = Fleet([8] * 3, prior[:3]), Fleet([8] * 4, prior), Fleet([8] * 3)
    for number, (worker, known, tokens) in enumerate(requests):
        one = profile(rng, 5) if known else None
        for fleet in (old, same):
            fleet.admit(f"r{number}", worker, tokens, one)
    new = Fleet([8] * 4, prior)
    new.take_over(old, priors=True)
    plain.take_over(old)
    for fleet in (new, plain):
        check_fleet(fleet)
        assert fleet.running[:3].tolist() == old.running.tolist()
        assert fleet.context_tokens[:3].tolist() == old.context_tokens.tolist()
        assert fleet.routed == len(requests)
    same._mean = -1.0  # all are made anew, as after a large change
    same._shift(0, None, 0)
    np.testing.assert_array_equal(new.missed, same.missed)
    np.testing.assert_array_equal(new._prior, same._prior)
    for number in range(len(requests)):
        new.finish(f"r{number}")
        plain.finish(f"r{number}")
    assert not new._logs.any()
    assert not plain.running.any()
    if requests:
        with pytest.raises(ConfigError, match="only an empty one"):
            old.take_over(old)


def test_a_smaller_fleet_takes_over_what_fits() -> None:
    old, new = Fleet([2, 2, 2]), Fleet([2, 2])
    old.admit("a", 1)
    new.take_over(old)
    assert new.running.tolist() == [0, 1]
    old.admit("b", 2)
    with pytest.raises(ConfigError, match="worker 2"):
        Fleet([2, 2]).take_over(old)


def test_a_worker_takes_on_the_character_of_who_comes() -> None:
    """After drift the fitted character counts for little, also once those who came have gone."""
    prior = np.array([[0.5, 0.0], [0.0, 0.5]], np.float32)
    fleet, other = Fleet([4, 4], prior), np.array([0.0, 0.5], np.float32)
    for number in range(4 * PRIOR_WINDOW):
        fleet.admit(f"r{number}", 0, 0, other)
        fleet.finish(f"r{number}")
    fleet.admit("one", 1, 0, other)
    assert fleet.missed[0, 0] > 250
    assert fleet.missed[0, 1] < 220


def test_a_prior_of_zeros_does_not_become_denormal() -> None:
    """A mean of zeros shrinks for ever; numbers below 1e-38 are slow to compute with."""
    fleet, nothing = Fleet([4], np.full((1, 3), 0.5)), np.zeros(3, np.float32)
    for number in range(100 * PRIOR_WINDOW):
        fleet.admit(f"r{number}", 0, 0, nothing)
        fleet.finish(f"r{number}")
    assert not fleet._prior.any()
