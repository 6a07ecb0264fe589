from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from fleet_checks import run_checked
from fleet_reality import TIMELINE, read_timeline, simulate_timeline, vllm_timeline_rows


@pytest.mark.long
def test_vllms_timeline_within_ten_percent(data_dir: Path) -> None:
    rows = {row["name"]: row for row in vllm_timeline_rows(data_dir)}
    held_out = rows["chosen on the other half"]
    for name in ("ttft_p50", "ttft_p99", "tpot_p50", "tpot_p99"):
        assert abs(held_out[f"{name}_error_pct"]) <= 10.0, name
    assert rows["spread routing"]["worst_error_pct"] > 10.0, "experts matter"
    assert rows["no scheduling ahead"]["worst_error_pct"] > 10.0, "so does when a request may join"


def test_the_simulated_timeline_keeps_its_rules(data_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fleet_reality.run_fleet", run_checked)
    timeline = read_timeline(data_dir / TIMELINE)
    first = timeline._replace(**{name: column[:40] for name, column in timeline._asdict().items()})
    run = simulate_timeline(first, 2.0)
    assert np.isfinite(run.finish_s).all()
