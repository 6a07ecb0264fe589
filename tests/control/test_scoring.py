"""Scores of a fit against a closed form, and comparisons that must come out one way."""

from __future__ import annotations

import numpy as np
import pytest

from control_traffic import BATCH, NEW, OLD, SETTINGS, SHAPE, band, fitted, made_requests
from coterie.control import Scorer
from coterie.control.traffic import Kept, Traffic
from coterie.costs.lines import DecodeStepPrices
from coterie.errors import ConfigError
from coterie.routing import RouterFit
from coterie.routing.fleet import MOST_CERTAIN

PRICES = DecodeStepPrices(
    fixed_us=50.0, expert_us=2.0, request_us=0.5, context_us=0.01, transfer_us=0.1, prefill_us=1.0, output_tokens=40.0
)


def kept_of(groups: np.ndarray, count: int, seed: int) -> list[Kept]:
    traffic = Traffic(SHAPE, SETTINGS)
    for one in made_requests(np.random.default_rng(seed), groups, count):
        traffic.add(one)
    return list(traffic.kept)


@pytest.fixture(scope="module")
def fits() -> tuple[RouterFit, RouterFit]:
    return (
        fitted(made_requests(np.random.default_rng(0), OLD, 64)),
        fitted(made_requests(np.random.default_rng(1), NEW, 64)),
    )


def test_a_request_alone_takes_the_price_of_its_own_experts(fits: tuple[RouterFit, RouterFit]) -> None:
    requests = kept_of(NEW, 2, 2)
    token_us = Scorer(band, 1, PRICES).token_us(fits[0], requests, workers=1)  # one in flight
    for us, one in zip(token_us, requests, strict=True):
        chance = np.minimum(one.decode / one.tokens, MOST_CERTAIN)
        context = 20 + one.tokens / 2
        assert us == pytest.approx(50.0 + 2.0 * chance.sum() + 0.5 + 0.01 * context, rel=1e-4)


def test_the_right_fit_is_better_and_a_fit_is_as_good_as_itself(fits: tuple[RouterFit, RouterFit]) -> None:
    scorer, requests = Scorer(band, BATCH, PRICES), kept_of(NEW, 64, 3)
    better = scorer.compare(fits[0], fits[1], requests, SHAPE.workers, 8, 0.975)
    assert better.saving > 0.02
    assert 0 < better.bound < better.saving
    worse = scorer.compare(fits[1], fits[0], requests, SHAPE.workers, 8, 0.975)
    assert worse.saving < 0
    same = scorer.compare(fits[0], fits[0], requests, SHAPE.workers, 8, 0.975)
    assert same.saving == same.bound == 0.0


def test_scores_are_reproducible_and_change_nothing(fits: tuple[RouterFit, RouterFit]) -> None:
    scorer, requests = Scorer(band, BATCH), kept_of(OLD, 48, 4)
    profiles = fits[0].profiles.copy()
    first = scorer.token_us(fits[0], requests, SHAPE.workers)
    assert np.array_equal(first, scorer.token_us(fits[0], requests, SHAPE.workers))
    assert np.array_equal(profiles, fits[0].profiles)


def test_one_request_cannot_be_scored(fits: tuple[RouterFit, RouterFit]) -> None:
    with pytest.raises(ConfigError, match="requests=1"):
        Scorer(band, BATCH).token_us(fits[0], kept_of(OLD, 1, 5), 2)
