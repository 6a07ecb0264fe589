"""Whole steps as an engine runs them: waves, tile sizes, and cells that the fit has not seen."""

from __future__ import annotations

import json
import math
from pathlib import Path

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import coterie
from coterie.costs.experts import MoeParams, Waves, layer_us
from coterie.costs.presets import load_preset, save_preset, step_model
from coterie.costs.step import Batch
from coterie.errors import ConfigError, TraceError
from coterie.models import get_model

SPEC = get_model("gpt-oss-20b")


def params(**given: object) -> MoeParams:
    plain: dict[str, object] = {
        "overhead_us": 3.0,
        "token_us": 0.5,
        "stream_bytes_per_us": 1e6,
        "row_us": 0.0,
        "sharpness": 30.0,
    }
    plain |= {"fill_penalty": 0.0, "partial_penalty": 0.0, "tile_flops_per_us": (1.0, 1.0, 1.0)}
    return MoeParams(**{**plain, "tile_rows": (1, 16, 128), "switch_rows": (0.25, 8.0), **given})  # type: ignore[arg-type]


@given(st.lists(st.integers(0, 40), min_size=4, max_size=12).filter(any), st.integers(1, 3), st.integers(1, 30))
def test_waves_are_counted_as_by_hand(rows: list[int], least: int, columns: int) -> None:
    waves = Waves((2.0, 5.0, 40.0), (columns, 7), 13, least)
    mean = sum(rows) / len(rows)
    size = 0 if mean <= 0.25 else 1 if mean <= 8.0 else 2
    tiles = sum(math.ceil(count / (1, 16, 128)[size]) for count in rows)
    count = max(least, math.ceil(tiles * columns / 13)) + math.ceil(tiles * 7 / 13)
    expected = 3.0 + 0.5 * 20 + waves.wave_us[size] * count
    assert layer_us(params(waves=waves).array(1e6, 1.0), np.array(rows, float), 20.0) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("rows", "further_us"), [(1, 0.0), (2, 5.0), (16, 0.0), (17, 7.0), (120, 7 * 7.0), (300, 20.0)]
)
def test_every_tile_size_has_its_own_price(rows: int, further_us: float) -> None:
    """One expert of 8 gets all rows: 2 rows are a mean of 1/4, up to 128 rows one of at most 16."""
    rates = (1 / 5.0, 16 / 7.0, 128 / 10.0)  # a further tile of 1, 16 or 128 rows takes 5, 7 or 10 us
    counts = np.zeros(8)
    counts[0] = rows
    given = params(overhead_us=0.0, token_us=0.0, tile_flops_per_us=rates, switch_rows=(0.25, 16.0))
    assert layer_us(given.array(20e6, 1.0), counts, 1.0) == pytest.approx(20.0 + further_us, rel=1e-6)


def test_one_switch_as_a_number_is_that_of_two_tiles() -> None:
    two = params(tile_rows=(16, 64), tile_flops_per_us=(1.0, 2.0), switch_rows=16.0)
    np.testing.assert_array_equal(two.array(), msgspec.structs.replace(two, switch_rows=(16.0,)).array())


def test_an_engine_is_never_guessed() -> None:
    with pytest.raises(
        ConfigError, match=r"olmoe-1b-7b in bf16 was not measured in vllm on h200, but .*gpt-oss-20b in"
    ):
        coterie.step_model("olmoe-1b-7b", engine="vllm")
    with pytest.raises(
        ConfigError, match="gpt-oss-20b in mxfp4 was not measured in sglang on h200, but deepseek-v3 in"
    ):
        coterie.step_model("gpt-oss-20b", engine="sglang")
    with pytest.raises(ConfigError, match="not measured in trtllm on h200, but nothing"):
        coterie.step_model("gpt-oss-20b", engine="trtllm")


def test_wrong_numbers_of_an_engine_are_refused(tmp_path: Path) -> None:
    preset = load_preset("h200")
    fit = preset.engines["vllm"]["gpt-oss-20b"]["bf16"]
    wrong = msgspec.structs.replace(fit.rest, times_us=(-1.0,) * len(fit.rest.at))
    bad = {"vllm": {"gpt-oss-20b": {"bf16": msgspec.structs.replace(fit, rest=wrong)}}}
    save_preset(msgspec.structs.replace(preset, engines=bad), tmp_path / "bad.json")
    with pytest.raises(TraceError, match="times_us"):
        load_preset(str(tmp_path / "bad.json"))


@pytest.mark.parametrize(("dtype", "cells"), [("mxfp4", 64), ("bf16", 45)])
def test_whole_steps_that_were_measured_in_another_run(data_dir: Path, dtype: str, cells: int) -> None:
    """Decode steps of vLLM in another run, none of which the fit has seen: 2% off on average, 6% at worst."""
    model = step_model(SPEC, "h200", dtype, engine="vllm")  # type: ignore[arg-type]
    assert model.head is not None
    path, off = data_dir / "vllm-steps-h200" / f"sweep_{dtype}.jsonl", []
    for line in path.read_text().splitlines():
        cell = json.loads(line)
        if "rows" not in cell:
            continue
        rows, distinct = cell["rows"], int(cell["distinct"])
        load = np.tile(np.bincount(np.arange(4 * rows) % distinct, minlength=32), (24, 1))
        step = model.step(load, Batch(decode_requests=rows, decode_context=rows * cell["context"]))
        off.append(1e3 * (step.total_s - 1e-6 * model.head.us(rows)) / cell["gpu_ms"] - 1.0)
    assert len(off) == cells
    assert np.mean(np.abs(off)) < 0.02
    assert np.max(np.abs(off)) < 0.06
