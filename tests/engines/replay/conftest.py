"""Batches that several files replay."""

from __future__ import annotations

import pytest

from coterie.engines.replay.batches import ReplayBatches
from replay_cases import small


@pytest.fixture
def batches() -> ReplayBatches:
    return ReplayBatches("tiny", {g: {r: tuple(s) for r, s in one.items()} for g, one in small().items()})
