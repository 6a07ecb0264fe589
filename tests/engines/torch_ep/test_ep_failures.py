"""One rank fails: every rank raises, with the same cause, and none waits for a timeout."""

from __future__ import annotations

import re

import pytest

from coterie.engines.ranks import run_ranks
from coterie.errors import UnavailableError

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.torch

PATIENCE_S = 120.0
"""Far above what it takes: a rank that waits for a timeout would fail the test."""


def test_a_rank_that_raises_is_named_by_all() -> None:
    from ep_migrations import fails

    errors = run_ranks(fails, "raises", 4, doing="failing", timeout_s=2 * PATIENCE_S)
    assert errors[1].startswith("ConfigError: experts holds -")
    for rank in (0, 2, 3):
        assert errors[rank].startswith("RankFailedError: rank 1 failed in layer 0: ConfigError"), errors


def test_a_rank_that_dies_in_a_collective_ends_it_for_all() -> None:
    from ep_migrations import fails

    with pytest.raises(UnavailableError) as caught:
        run_ranks(fails, "dies", 4, doing="failing", timeout_s=2 * PATIENCE_S, grace_s=PATIENCE_S)
    told = str(caught.value)
    assert "rank 1 was ended by SIGKILL at the failure" in told
    causes = dict(re.findall(r"rank (\d) failed at the failure: RankFailedError: (rank \d (?:lost|was)[^;]*)", told))
    assert sorted(causes) == ["0", "2", "3"], told
    assert len(set(causes.values())) == 1, told


def test_a_rank_that_is_silent_ends_it_for_all() -> None:
    """The operation cannot end, so a short timeout is as good as a long one."""
    from ep_migrations import fails

    errors = run_ranks(fails, "is silent", 4, doing="failing", timeout_s=2 * PATIENCE_S)
    assert len(set(errors)) == 1
    assert re.fullmatch(r"RankFailedError: rank [023] waited 1 s for \w+", errors[0])
