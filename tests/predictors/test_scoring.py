"""The cosine of loads, and the split of requests by groups."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from coterie.errors import ConfigError
from coterie.predictors.scoring import TEST_SHARE, cosine, split_groups


def test_the_cosine_by_hand() -> None:
    np.testing.assert_allclose(cosine(np.array([[[3, 4]]]), np.array([[[4, 3]]])), 24 / 25)
    assert cosine(np.zeros((1, 1, 4)), np.array([[[5, 4, 1, 0]]]))[0, 0] == 0


@given(st.lists(st.integers(0, 8), min_size=2, max_size=60).filter(lambda g: len(set(g)) > 1), st.integers(0, 99))
def test_a_split_keeps_groups_whole(groups: list[int], seed: int) -> None:
    calibration, test = split_groups(groups, np.random.default_rng(seed))
    assert sorted([*calibration, *test]) == list(range(len(groups)))
    sides = [{groups[i] for i in side} for side in (calibration, test)]
    assert all(sides)
    assert not sides[0] & sides[1]
    assert len(sides[1]) == min(len(set(groups)) - 1, max(1, round(TEST_SHARE * len(set(groups)))))


def test_requests_of_one_group_cannot_be_split() -> None:
    with pytest.raises(ConfigError, match="3 requests share 1 prompt"):
        split_groups(["same"] * 3, np.random.default_rng(0))
