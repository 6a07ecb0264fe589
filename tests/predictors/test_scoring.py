"""The cosine of loads, and the split of requests by groups."""

from __future__ import annotations

import numpy as np
import pytest

from coterie.errors import ConfigError
from coterie.predictors.scoring import cosine, split_groups


def test_the_cosine_by_hand() -> None:
    np.testing.assert_allclose(cosine(np.array([[[3, 4]]]), np.array([[[4, 3]]])), 24 / 25)
    assert cosine(np.zeros((1, 1, 4)), np.array([[[5, 4, 1, 0]]]))[0, 0] == 0


def test_groups_stay_on_one_side() -> None:
    groups = np.repeat(np.arange(10), 3).tolist()
    fit, test = split_groups(groups, np.random.default_rng(0))
    assert sorted([*fit, *test]) == list(range(30))
    assert len(test) == 9
    assert {groups[at] for at in fit}.isdisjoint(groups[at] for at in test)
    with pytest.raises(ConfigError, match="3 requests share 1 prompt"):
        split_groups(["same"] * 3, np.random.default_rng(0))
