"""Experts move between ranks while steps run: outputs stay, failures roll back on all ranks, nothing is left behind."""

from __future__ import annotations

import pytest

from coterie.engines.ranks import run_ranks

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.torch


def test_outputs_stay_through_200_switches_with_failures() -> None:
    from ep_migrations import STAGING, migrate

    ranks = run_ranks(migrate, 200, 4, doing="migrating", timeout_s=240)
    for found in ranks:
        assert found.switches >= 200
        assert found.steps > found.switches / 2
        assert (found.wrong_steps, found.wrong_weights) == (0, 0)
        assert found.free == STAGING, "all staging is free again"
        assert found.reasons == ranks[0].reasons, "rolled back on all ranks, for the same reason"
        assert found.stall_s > 0
    reasons = " ".join(ranks[0].reasons)
    for told in ("has no staging: injected", "could not send expert", "arrived damaged"):
        assert told in reasons
    assert 0 < sum(found.sent_bytes for found in ranks) <= ranks[0].moved_bytes


def test_cancelling_leaves_nothing_behind() -> None:
    from ep_migrations import STAGING, cancelled

    for stopped, wrong, free in run_ranks(cancelled, None, 2, doing="cancelling", timeout_s=240):
        assert (stopped, wrong, free) == ("enough", 0, STAGING)
