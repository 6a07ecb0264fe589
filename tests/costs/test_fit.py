"""Fits recover known laws, and say honestly how far off they are."""

from __future__ import annotations

import numpy as np
import pytest

from coterie.costs import fit
from coterie.costs.cells import MoeCell
from coterie.costs.roofline import fit_curve, fit_roofline, fit_transfer
from coterie.errors import ConfigError

NBYTES, FLOPS = 9.4e6, 9.4e6
TRUTH = np.array([25.0, 0.01, 3e6, 0.004, 5e8, 6.5e8, 6.0, 0.3, 0.4, 0.2])
SHAPE = fit._Shape((128, 256), 128.0, False)


def cells(noise: float, rng: np.random.Generator) -> list[MoeCell]:
    grid = [
        MoeCell(tokens, active, 1.0)
        for tokens in (1, 4, 16, 48, 64, 192, 256, 768, 1024, 1536, 2048, 4096, 8192)
        for active in (8, 16, 32, 64, 96, 128)
        if 8 <= active <= tokens * 8
    ]
    us = fit._predict(TRUTH, fit._table(grid, 8, 128, NBYTES, FLOPS, float("inf")), SHAPE)
    us = us * np.exp(noise * rng.standard_normal(len(us)))
    return [MoeCell(c.tokens, c.active, float(t)) for c, t in zip(grid, us, strict=True)]


@pytest.fixture(scope="module")
def quiet() -> fit.MoeFit:
    return fit.fit_moe(cells(0.01, np.random.default_rng(0)), 8, 128, NBYTES, FLOPS)


def test_a_known_law_is_recovered(quiet: fit.MoeFit) -> None:
    assert quiet.held_out.mape_pct < 2.5
    assert quiet.held_out.worst_pct < 10
    assert quiet.params.tile_rows == (128, 256)


def test_held_out_error_shows_noise_that_the_fit_cannot_know(quiet: fit.MoeFit, rng: np.random.Generator) -> None:
    loud = fit.fit_moe(cells(0.15, rng), 8, 128, NBYTES, FLOPS).held_out.mape_pct
    assert loud > 8 > quiet.held_out.mape_pct


@pytest.mark.parametrize("us", [float("nan"), 0.0, -3.0, float("inf")])
def test_times_must_be_positive_numbers(us: float, rng: np.random.Generator) -> None:
    bad = [*cells(0.01, rng), MoeCell(5, 10, us)]
    with pytest.raises(ConfigError, match="tokens=5, active=10 must be positive"):
        fit.fit_moe(bad, 8, 128, NBYTES, FLOPS)


def test_too_few_cells_are_refused(rng: np.random.Generator) -> None:
    with pytest.raises(ConfigError, match="too few"):
        fit.fit_moe(cells(0.01, rng)[:9], 8, 128, NBYTES, FLOPS)


def test_roofline_recovers_bandwidth_and_rate(rng: np.random.Generator) -> None:
    nbytes = np.logspace(4, 9, 60)
    flops = np.logspace(6, 12, 60)[rng.permutation(60)]
    us = (5 + np.maximum(nbytes / 3e6, flops / 5e8)) * np.exp(0.02 * rng.standard_normal(60))
    found = fit_roofline(nbytes, flops, us)
    assert abs(found.bytes_per_us / 3e6 - 1) < 0.15
    assert abs(found.flops_per_us / 5e8 - 1) < 0.15
    assert found.held_out.mape_pct < 8
    assert found.us(3e8, 0) == pytest.approx(found.overhead_us + 3e8 / found.bytes_per_us, rel=1e-6)


def test_transfer_recovers_latency_and_bandwidth(rng: np.random.Generator) -> None:
    nbytes = np.logspace(3, 9, 20)
    found = fit_transfer(nbytes, (8 + nbytes / 55e3) * np.exp(0.02 * rng.standard_normal(20)))
    assert found.latency_us == pytest.approx(8, rel=0.1)
    assert found.bytes_per_us == pytest.approx(55e3, rel=0.1)


def test_a_law_needs_cells() -> None:
    with pytest.raises(ConfigError, match="too few"):
        fit_transfer([1, 2], [1, 2])
    with pytest.raises(ConfigError, match="must be positive"):
        fit_transfer([1, 2, 3], [1, float("nan"), 2])


def test_a_curve_goes_through_its_points_and_on() -> None:
    found = fit_curve([1, 4, 2], [10.0, 40.0, 20.0])
    assert [found.us(x) for x in (1, 2, 3, 4, 8, 0.5)] == [10, 20, 30, 40, 80, 10]
    assert found.held_out.worst_pct == 0.0
    assert fit_curve([1, 2, 3], [10.0, 40.0, 30.0]).held_out.worst_pct == 50.0
    with pytest.raises(ConfigError, match="too few"):
        fit_curve([1, 2], [1.0, 2.0])
