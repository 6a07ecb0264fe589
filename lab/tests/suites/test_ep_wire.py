"""Bytes of a real run beside the cost model's prediction."""

from __future__ import annotations

import numpy as np
import pytest

from coterie.costs.exchange import counted_locality
from coterie.types import Placement, Topology

pytest.importorskip("torch")
pytestmark = pytest.mark.torch


def test_bytes_are_within_two_percent_of_the_prediction() -> None:
    """All of them, with slots, weights and counts; of hidden states alone every byte."""
    from coterie_lab.suites.sem_moe.measuring import measure_wire

    experts = np.argsort(np.random.default_rng(0).random((60, 2, 16)), axis=2)[:, :, :4]
    placement = Placement.linear(2, 16, 4)
    found = measure_wire(experts, placement, hidden_size=512)
    expected = counted_locality(experts, placement, Topology(4))
    for measured, crossing in ((found.deduplicated, expected.remote_ranks), (found.per_activation, expected.remote)):
        predicted = 2 * 60 * 2 * crossing * 512 * 4
        assert measured.hidden == pytest.approx(predicted, rel=1e-12)
        assert 0 < measured.other <= 0.02 * predicted
        if measured.tcp is not None:  # gloo frames every message, and there are few bytes in one
            assert 1 <= measured.tcp / (measured.hidden + measured.other) <= 1.1
