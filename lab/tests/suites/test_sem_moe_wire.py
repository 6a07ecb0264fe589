"""The wire part of the suite: its rows and notes, or a note where torch is missing; bytes beside the prediction."""

from __future__ import annotations

import os
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest

from coterie.answers.suites import SuiteOptions
from coterie.types import Placement, Topology
from coterie_lab.suites.all_to_all.counting import counted_locality
from coterie_lab.suites.sem_moe import wire
from coterie_lab.suites.sem_moe.wire import wire_notes, wire_rows


@pytest.mark.skipif(find_spec("torch") is not None, reason="torch is installed")
def test_a_note_without_torch() -> None:
    rows = wire_rows(SuiteOptions(), lambda *_: None)
    assert rows == []
    assert "needs torch" in " ".join(wire_notes(rows))


@pytest.mark.torch
def test_rows_and_notes(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("torch")
    monkeypatch.setattr(wire, "RANKS", (2,))
    monkeypatch.setattr(wire, "SHUFFLE_TOKENS", 64)
    data = os.environ.get("COTERIE_DATA")
    rows = wire.wire_rows(SuiteOptions(data=Path(data) if data else None), lambda *_: None)
    parts = [row["part"] for row in rows]
    assert parts == ["shuffle", "migration", *(["wire", "wire"] if data else [])]
    shuffle, migration, *sent = rows
    assert min(shuffle[key] for key in ("gloo_ms", "plain_ms", "shuffled_ms", "early_ms")) > 0
    assert shuffle["published"] == 1.01
    assert migration["switches"] >= 40
    assert migration["changed_steps"] == 0
    assert migration["sent_bytes"] == migration["planned_bytes"]
    for row in sent:
        assert row["ratio"] == pytest.approx(1, abs=0.02)
    notes = wire.wire_notes(rows)
    assert len(notes) == 3
    assert "NCCL was not run" in notes[0]
    assert ("at most 0.0%" in notes[2]) == bool(data)


@pytest.mark.torch
def test_bytes_are_within_two_percent_of_the_prediction() -> None:
    """All of them, with slots, weights and counts; of hidden states alone every byte."""
    pytest.importorskip("torch")
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
