"""Requests of a recording that a router is fitted on, and those that are served."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from coterie.answers.fleet.bench import Source, split
from coterie.routing import calibration
from coterie.sim.fleet.requests import split_recordings
from coterie.traces import ActivationTrace
from coterie.traces.readers import read_as


@pytest.fixture(scope="module")
def source(data_dir: Path) -> Source:
    trace = read_as(ActivationTrace, data_dir / "activations" / "gpt-oss-20b" / "routing.npz")
    return Source(trace, calibration(trace))


def test_requests_are_fitted_on_or_served_and_never_both(source: Source) -> None:
    halves = split(source, 3)
    assert not set(halves.fit) & set(halves.test)
    assert len(halves.fit) + len(halves.test) == source.trace.num_requests
    assert set(halves.fit) != set(split(source, 4).fit)


def test_what_is_shown_is_the_first_half_and_what_is_decoded_the_second(source: Source) -> None:
    halves = split(source, 0)
    recordings = split_recordings(source.trace, halves.test)
    rows = np.flatnonzero(np.isin(source.counts.requests, halves.test))
    assert len(recordings) == len(rows)
    np.testing.assert_array_equal(recordings.footprint, source.counts.prefill[rows])
    np.testing.assert_array_equal(recordings.decode_row, recordings.prompt_row + recordings.prompt_rows)
