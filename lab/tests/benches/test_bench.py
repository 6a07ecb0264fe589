"""Benchmarks print what their contract says, at sizes that take no time; how fast they are is not a test."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace

from command_line import runner
from coterie.answers.suites import Report, benches
from coterie.batching import strategies
from coterie.costs.presets import Preset, load_preset, shape_spec
from coterie_lab.benches import co_clustering as bench
from coterie_lab.benches.batching import SIZES, STEP_COST, prompt_loads
from coterie_lab.benches.costs import _unseen_row
from coterie_lab.benches.kvindex import kv_directory_rows
from coterie_lab.benches.placement import Contest, Size, Trial, drifted
from coterie_lab.benches.timing import Row


def one_table(name: str) -> Preset:
    """The preset with a quarter of one table to fit; fits of all its parts stay."""
    preset = load_preset(name)
    first, *others = preset.measurement.shapes
    few = replace(first, moe=[replace(first.moe[0], cells=first.moe[0].cells[::4])])
    shapes = [few, *(replace(shape, moe=[]) for shape in others)]
    return replace(preset, measurement=replace(preset.measurement, shapes=shapes))


def few_blocks(report: Report, **_sizes: int) -> list[Row]:
    return kv_directory_rows(report, num_blocks=3136, num_workers=4, prompts=3)


ROUTING = {"routing.SIZES": (4,), "routing.FIT_REQUESTS": 64, "routing.FIT_WORKERS": 4}
ROUTING |= {"routing.kv_directory_rows": few_blocks}
SMALL: dict[str, dict[str, Any]] = {
    "batching": {"batching.REPEATS": 1},
    "co-clustering": {
        f"co_clustering.{name}": value
        for name, value in {"ITEMS": 60, "LAYERS": 2, "EXPERTS": 16, "TOP_K": 2, "RANKS": 4, "THEMES": 4}.items()
    },
    "costs": {"costs.preset_names": lambda: ["h200"], "costs.load_preset": one_table},
    "placement": {
        "placement.EXPERTS": 32,
        "placement.LAYERS": 2,
        "placement.SIZES": (Size(40, 4, 0.98),),
        "placement.SEEDS": range(1),
        "placement.REPEATS": 1,
        "placement.drifted": lambda size, seed, layers=2, experts=32: drifted(size, seed, layers, experts),
        "placement.CONTESTS": (Contest(Size(40, 4, 0.98), "optimal", 1, 0.5),),
        "placement.TRIALS": (Trial("small", 16, 20, 4, layers=1),),
        "placement_steps.SIZES": ((36, 4),),
        "placement_steps.REPEATS": 1,
    },
    "routing": ROUTING,
    "scale": ROUTING,
    "sim": {"sim.DECODERS": 2, "sim.IN_FLIGHT": 8, "sim.REPEATS": 1, "sim.SYNTHETIC_REQUESTS": 16},
    "traces": {"traces.TRACE_BYTES": 2_000_000},
}
"""Sizes that take no time, by group."""
NAMES = {
    "co-clustering": ["sem_moe plan", "co_cluster plan"],
    "costs": ["moe layer", "unseen shape", "dense", "decode attention", "prefill attention", "routing", "copy"],
    "routing": ["decision", "admit and finish", "fit", "kv_match_tokens", "kv_apply", "kv_stream"],
    "scale": ["decision", "admit and finish", "kv_match_tokens", "kv_apply", "kv_stream"],
    "sim": ["decode"],
    "traces": ["generate", "open", "read one request", "count load", "copy"],
}
"""Kinds of rows, of groups whose rows have a name."""


@pytest.mark.parametrize("group", benches.names())
def test_every_group_has_rows_that_can_be_printed(
    group: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """By the command, at a size that takes no time; without recorded routing."""
    monkeypatch.delenv("COTERIE_DATA", raising=False)
    for name, value in SMALL[group].items():
        monkeypatch.setattr(f"coterie_lab.benches.{name}", value)
    run = runner(monkeypatch, capsys, "bench")
    ran = run(group, "--json")
    assert ran.code == 0, ran.err
    rows = [{key: value for key, value in row.items() if key != "group"} for row in json.loads(ran.out)["rows"]]
    assert list(dict.fromkeys(row["name"] for row in rows if "name" in row)) == NAMES.get(group, [])
    timed = [value for row in rows for key, value in row.items() if key in ("median_us", "median_ms")]
    assert min(timed) >= 0
    monkeypatch.setitem(benches._items, "these", lambda _report: rows)
    ran = run("these")
    assert ran.code == 0, ran.err
    assert ran.out


def test_an_unseen_shape_is_predicted_from_another_one() -> None:
    preset = load_preset("h200")
    for shape in preset.measurement.shapes:
        for table in shape.moe:
            row = _unseen_row(preset, shape_spec(shape), table)
            assert row["from"] != shape.model
            assert 0 < row["mape_pct"] < 20


def test_a_row_for_every_strategy_and_size() -> None:
    rows = benches["batching"](lambda *_: None)
    assert [list(row) for row in rows] == [["strategy", "window", "batch", "experts", "median_us"]] * len(rows)
    sizes = [(window, batch, experts) for window, batch, experts, _ in SIZES]
    found = [(row["strategy"], row["window"], row["batch"], row["experts"]) for row in rows]
    assert found == [(name, *size) for size in sizes for name in (*strategies, STEP_COST)]
    assert all(row["median_us"] > 0 for row in rows)


def test_loads_are_whole_tokens_of_every_prompt() -> None:
    loads = prompt_loads(np.random.default_rng(3), 50, 60, 4)
    assert loads.shape == (50, 1, 60)
    assert (loads == loads.round()).all()
    totals = loads.sum(axis=(1, 2))
    assert (totals % 4 == 0).all()
    assert totals.min() >= 16 * 4
    assert totals.max() <= 512 * 4


def test_items_are_of_a_model() -> None:
    items = bench.themed_items(np.random.default_rng(0), 50, 3, 8, 2, 4)
    assert items.weights.max() <= 1.0
    assert items.weights.sum(axis=2).max() <= 2 + 1e-9
    assert (np.sort(items.experts, axis=2)[:, :, 1:] != np.sort(items.experts, axis=2)[:, :, :-1]).all()
    assert (np.diff(items.frequency) <= 0).all()


def test_rows() -> None:
    rows = kv_directory_rows(lambda *_: None, num_blocks=3136, num_workers=4, prompts=3)
    names = [row["name"] for row in rows]
    assert names == [*(["kv_match_tokens"] * 2), "kv_apply", *(["kv_stream"] * 3)]
    assert all(row["blocks"] == 3136 for row in rows[:3])
    assert all(row["median_us"] > 0 for row in rows[:2])
    assert rows[2]["holdings"] == 2 * 16 * 256
    assert all(row["blocks_per_s"] > 0 for row in rows[2:])
