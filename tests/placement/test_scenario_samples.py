"""Samples of steps: about another mean, kept over windows, on disk."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from coterie.errors import ConfigError, TraceError
from coterie.placement import Load
from coterie.placement.scenarios import (
    LEAST_CONCENTRATION,
    MOST_RATIO,
    RecentSteps,
    at_mean,
    concentration_of,
    load_scenarios,
    mixes_of,
    mixtures,
    save_scenarios,
)
from coterie.traces.store import write_described


@given(seed=st.integers(0, 10_000), count=st.integers(1, 6), sparse=st.booleans(), weighted=st.booleans())
def test_steps_have_the_mean_that_is_asked_for(seed: int, count: int, sparse: bool, weighted: bool) -> None:
    rng = np.random.default_rng(seed)
    steps = rng.poisson(0.5 if sparse else 20.0, (count, 2, 8)).astype(float)
    weights = rng.dirichlet(np.ones(count)) if weighted else None
    mean = rng.gamma(0.5, 10.0, (2, 8)) * (rng.random((2, 8)) < 0.8)
    found = at_mean(steps, weights, mean)
    np.testing.assert_allclose(np.average(found, axis=0, weights=weights), mean, atol=1e-9)
    assert (found >= 0).all()
    assert (found[:, mean == 0] == 0).all()


def test_their_own_mean_leaves_steps_as_they_are() -> None:
    steps = np.random.default_rng(0).poisson(9.0, (5, 2, 8)).astype(float)
    np.testing.assert_allclose(at_mean(steps, None, steps.mean(axis=0)), steps)
    np.testing.assert_allclose(at_mean(steps, None, 3 * steps.mean(axis=0)), 3 * steps)


def test_an_expert_that_the_sample_hardly_knows_is_hot_in_every_step() -> None:
    steps = np.full((10, 1, 4), 10.0)
    steps[1:, 0, 3] = 0.0
    mean = np.array([[10.0, 10.0, 10.0, 10.0]])
    found = at_mean(steps, None, mean)[:, 0, 3]
    size = mean.sum() / steps.mean(axis=0).sum()
    assert found[0] == pytest.approx(10.0 * MOST_RATIO * size + found[1])
    assert (found[1:] > 4.0).all(), "not all of it in the one step that had it"


def test_another_shape_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"\(2, 8\).*\(1, 8\)"):
        at_mean(np.ones((3, 2, 8)), None, np.ones((1, 8)))


def window(value: float, count: int, whole: bool = False) -> Load:
    return Load.of_scenarios(np.full((count, 1, 2), value), whole_steps=whole)


def test_the_newest_steps_are_kept_weighted_as_their_windows() -> None:
    recent = RecentSteps(most=6)
    expected = Load(np.array([[2.0, 2.0]]))
    assert recent.around(expected) is expected, "none seen yet"
    recent.update(window(1.0, 4), 1.0)
    recent.update(Load(np.ones((1, 2))), 0.5)
    recent.update(window(3.0, 4), 0.25)
    found = recent.around(expected)
    assert found.weights is not None
    assert found.scenarios is not None
    np.testing.assert_allclose(found.weights, np.array([3, 3, 1, 1, 1, 1]) / 10, err_msg="two of the first window left")
    np.testing.assert_allclose(found.scenarios[:, 0, 0] / found.scenarios[0, 0, 0], [1, 1, 3, 3, 3, 3])
    np.testing.assert_allclose(np.average(found.scenarios, axis=0, weights=found.weights), expected.tokens)


def test_of_a_window_of_many_steps_some_are_kept() -> None:
    recent = RecentSteps(most=3)
    steps = np.arange(1.0, 8.0)[:, None, None] * np.ones((7, 1, 2))
    recent.update(Load.of_scenarios(steps, whole_steps=True), 0.4)
    found = recent.around(Load(np.full((1, 2), 4.0)))
    assert found.scenarios is not None
    np.testing.assert_allclose(found.scenarios[:, 0, 0], [1.0, 4.0, 7.0], err_msg="evenly spread")
    assert found.whole_steps
    recent.update(window(4.0, 2), 0.4)
    assert not recent.around(Load(np.full((1, 2), 4.0))).whole_steps


def test_files_give_back_what_was_written(tmp_path: Path) -> None:
    rng = np.random.default_rng(1)
    load = Load.of_scenarios(rng.poisson(5.0, (6, 2, 8)), rng.dirichlet(np.ones(6)), whole_steps=True)
    path = tmp_path / "steps.safetensors"
    path.write_text("an older file")
    save_scenarios(path, load)
    found = load_scenarios(path)
    assert found.whole_steps
    np.testing.assert_array_equal(found.scenarios, load.scenarios)
    assert found.weights is not None
    assert load.weights is not None
    np.testing.assert_allclose(found.weights, load.weights)
    np.testing.assert_allclose(found.tokens, load.tokens)
    assert [one.name for one in tmp_path.iterdir()] == ["steps.safetensors"]
    with pytest.raises(ConfigError, match="no scenarios"):
        save_scenarios(path, load.mean)


@pytest.mark.parametrize(
    ("arrays", "told"),
    [
        ({"steps": np.ones((2, 1, 4))}, "weights"),
        ({"steps": np.ones((2, 4)), "weights": np.ones(2)}, "must be .scenario, layer, expert"),
        ({"steps": np.ones((0, 1, 4)), "weights": np.ones(0)}, "none 0"),
        ({"steps": np.ones((2, 1, 4)), "weights": np.ones(3)}, "steps"),
        ({"steps": np.full((2, 1, 4), np.nan), "weights": np.ones(2)}, "must be finite"),
        ({"steps": -np.ones((2, 1, 4)), "weights": np.ones(2)}, "not negative"),
        ({"steps": np.ones((2, 1, 4)), "weights": np.zeros(2)}, "steps"),
        ({"steps": np.ones((2, 1, 4), np.int64), "weights": np.ones(2)}, "floats"),
    ],
)
def test_wrong_files_are_refused_by_name(tmp_path: Path, arrays: dict[str, np.ndarray], told: str) -> None:
    path = tmp_path / "steps.safetensors"
    write_described(path, arrays, {"format": "scenarios", "version": 1})
    with pytest.raises(TraceError, match=told):
        load_scenarios(path)


def test_other_files_are_no_samples(tmp_path: Path) -> None:
    path = tmp_path / "steps.safetensors"
    write_described(path, {"steps": np.ones((2, 1, 4))}, {"format": "router", "version": 1})
    with pytest.raises(TraceError, match="'scenarios' version 1"):
        load_scenarios(path)
    with pytest.raises(TraceError, match="does not exist"):
        load_scenarios(tmp_path / "missing")


def domains(count: int = 4) -> np.ndarray:
    """[domain, layer, expert] tokens, of unlike sizes."""
    rng = np.random.default_rng(2)
    sizes = np.arange(1, count + 1)[:, None, None]
    return np.asarray(rng.poisson(5000 * sizes * rng.dirichlet(np.full(16, 0.5), (count, 2))).astype(float))


def test_mixtures_are_about_the_mix_of_today_and_as_wide_as_asked_for() -> None:
    known, rng = domains(), np.random.default_rng(0)
    sizes = known.sum(axis=(1, 2))
    for concentration in (1.0, 8.0, 100.0):
        steps = mixtures(known, 4000, rng, concentration)
        mixes = mixes_of(steps, known)
        np.testing.assert_allclose(mixes.mean(axis=0), sizes / sizes.sum(), atol=0.03)
        assert concentration_of(mixes) == pytest.approx(concentration, rel=0.15), "by moments, from the steps alone"
        np.testing.assert_allclose(steps.sum(axis=2), steps[0].sum(axis=1)[0], err_msg="all of one size")


def test_domains_without_tokens_are_left_out() -> None:
    known = domains()
    known[[0, 3]] = 0.0
    steps = mixtures(known, 50, np.random.default_rng(0), 3.0)
    found = mixes_of(steps, domains())
    np.testing.assert_allclose(found[:, [0, 3]], 0.0, atol=1e-9)
    steady = mixtures(known, 2, np.random.default_rng(0), np.inf)
    np.testing.assert_array_equal(steady[0], steady[1])


def test_the_concentration_of_extremes() -> None:
    alone = np.eye(3)[np.arange(30) % 3]
    assert concentration_of(alone) == LEAST_CONCENTRATION, "one domain at a time"
    assert concentration_of(np.full((5, 3), 1 / 3)) == np.inf, "nothing shifts"


@pytest.mark.parametrize(
    ("wrong", "told"),
    [
        (lambda: mixtures(np.ones((2, 4)), 3, np.random.default_rng(0), 1.0), "domain, layer, expert"),
        (lambda: mixtures(domains(), 3, np.random.default_rng(0), 0.0), "concentration=0"),
        (lambda: mixtures(domains(), 0, np.random.default_rng(0), 1.0), "count=0"),
        (lambda: mixtures(0 * domains(), 3, np.random.default_rng(0), 1.0), "no tokens to mix"),
        (lambda: concentration_of(np.ones((1, 3))), "two or more windows"),
    ],
)
def test_wrong_mixtures_are_refused(wrong: Callable[[], object], told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        wrong()
