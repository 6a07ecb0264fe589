"""The ring of steps against a plain list."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from coterie.errors import InputError
from coterie.footprints.positions import COLUMNS, DISTINCT, ENDED_S, ROWS, PositionShape, PositionStore, StepLog


@given(size=st.integers(1, 9), steps=st.integers(0, 30), data=st.data())
def test_reads_the_last_steps_in_order(size: int, steps: int, data: st.DataObject) -> None:
    log = StepLog(np.zeros((size, len(COLUMNS))))
    told = [(float(step), step % 5, step / 3, 0.5) for step in range(steps)]
    for row in told:
        log.add(*row)
    first = max(0, steps - size)
    assert log.read().total == log.total == steps
    assert [tuple(row) for row in log.read().rows] == told[first:]
    after = data.draw(st.integers(first, steps))
    assert [tuple(row) for row in log.read(after).rows] == told[after:]
    for wrong in (first - 1, steps + 1):
        with pytest.raises(InputError, match=f"of {steps}, the last {size} are kept"):
            log.read(wrong)


def test_a_store_logs_its_steps(tmp_path: Path, rng: np.random.Generator) -> None:
    path = tmp_path / "a.slots"
    store = PositionStore.create(PositionShape(64, 3, 2, 8), path)
    ids = rng.integers(0, 8, (5, 3, 2))
    store.write(np.array([4, 9, -1, 7, 8]), ids)
    store.write(np.array([1]), ids[:1])
    found = PositionStore.attach(path).log.read()
    assert found.total == 2
    assert found.rows[:, ROWS].tolist() == [4, 1]
    kept = ids[[0, 1, 3, 4]]
    distinct = np.mean([len(np.unique(kept[:, layer])) for layer in range(3)])
    assert found.rows[0, DISTINCT] == pytest.approx(distinct)
    assert found.rows[0, ENDED_S] <= found.rows[1, ENDED_S]
    assert store.totals[:2] == (2, 5)
