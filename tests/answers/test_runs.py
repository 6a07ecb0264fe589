"""Intervals over runs."""

from __future__ import annotations

import numpy as np
import pytest

from coterie.answers.runs import error_bars, interval, told_apart, with_ends
from coterie.types import Interval


def test_interval_is_students() -> None:
    found = interval([1.0, 2.0, 3.0, 4.0])
    assert found.mean == 2.5
    assert found.high is not None
    assert found.high - found.mean == pytest.approx(3.182446 * np.std([1, 2, 3, 4], ddof=1) / 2)
    assert told_apart(found) == "surely"


def test_one_run_has_no_interval_and_none_is_printed_or_drawn() -> None:
    found = interval([7.0])
    assert found == Interval(7.0, None, None)
    assert with_ends(found, unit="%") == "+7.0%"
    assert told_apart(found) == "one run: no interval"
    assert error_bars([found, found]) is None
    drawn = error_bars([interval([1.0, 3.0])])
    assert drawn is not None
    assert drawn.shape == (2, 1)
