"""Where torch is missing, the wire part has a note instead of rows."""

from __future__ import annotations

from importlib.util import find_spec

import pytest

from coterie.evaluation.suites.base import SuiteOptions
from coterie.evaluation.suites.sem_moe.wire import wire_notes, wire_rows


@pytest.mark.skipif(find_spec("torch") is not None, reason="torch is installed")
def test_a_note_without_torch() -> None:
    rows = wire_rows(SuiteOptions(), lambda *_: None)
    assert rows == []
    assert "needs torch" in " ".join(wire_notes(rows))
