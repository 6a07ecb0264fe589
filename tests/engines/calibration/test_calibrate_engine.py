"""What a calibration runs and reads; test_imposed_vllm.py runs it in vLLM."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from coterie.costs.cells import step_load
from coterie.engines.calibration.calibrate import (
    RoutedTokens,
    StepGrid,
    _jobs,
    _Tokens,
    measure_copies,
    model_config,
    routed_tokens,
)
from coterie.errors import ConfigError
from coterie.models import get_model
from coterie.traces.activations import ActivationTrace
from coterie.traces.segments import TraceMeta

SPEC = get_model("coterie-tiny")


@given(st.integers(1, 40), st.integers(SPEC.top_k, SPEC.num_experts), st.integers(0, 99))
def test_even_batches_touch_as_many_experts_in_every_layer(rows: int, distinct: int, seed: int) -> None:
    distinct = min(distinct, rows * SPEC.top_k)
    tokens = _Tokens(SPEC, RoutedTokens.draw(SPEC, 2, 4), np.random.default_rng(seed))
    at = tokens.even(rows, distinct)
    ids = np.concatenate(tokens.parts)[at]
    load = step_load(ids, SPEC.num_experts)
    assert (load.sum(axis=1) == rows * SPEC.top_k).all()
    assert ((load > 0).sum(axis=1) == distinct).all()
    assert load.max() - load[load > 0].min() <= 1
    assert (np.diff(np.sort(ids.astype(int), axis=2), axis=2) > 0).all(), "a token takes an expert once"


def test_drawn_tokens_are_uneven_and_of_the_shape() -> None:
    tokens = RoutedTokens.draw(SPEC, 8, 16)
    assert tokens.ids.shape == (128, SPEC.num_moe_layers, SPEC.top_k)
    assert tokens.ids.max() < SPEC.num_experts
    assert (np.diff(np.sort(tokens.ids.astype(int), axis=2), axis=2) > 0).all()
    load = step_load(tokens.ids, SPEC.num_experts)
    assert (load.max(axis=1) > 2 * np.maximum(1, np.median(load, axis=1))).all()


def test_a_grid_has_every_kind_of_step() -> None:
    grid = StepGrid(rows=(1, 4), contexts=(16, 32), prompts=(64, 128), draws=8, repeats=2)
    tokens = _Tokens(SPEC, RoutedTokens.draw(SPEC, 4, 32), np.random.default_rng(0))
    jobs = list(_jobs(grid, tokens))
    decode = [job for job in jobs if not job.prompts]
    assert {(job.at.shape[1], job.context) for job in decode} == {(1, 16), (1, 32), (4, 16), (4, 32)}
    assert all(not any(job.even) for job in decode if job.context == 16)
    assert all(any(job.even) for job in decode if job.context == 32)
    prompts = [(job.at.shape[1], job.prompts, job.left_out) for job in jobs if job.prompts]
    assert prompts.count((64, 1, False)) == prompts.count((128, 1, False)) == 2, "even and drawn"
    assert {(72, 1, True), (136, 1, True), (136, 8, True)} < set(prompts)
    assert all(job.at.max() < tokens.size for job in jobs)


def test_sizes_that_a_model_is_too_short_for_are_left_out() -> None:
    assert StepGrid().within(4096).contexts == (128, 512, 2048)
    assert StepGrid().within(4096).prompts == (128, 256, 512, 1024, 2048)
    with pytest.raises(ConfigError, match="too short"):
        StepGrid().within(300)


def test_a_config_of_a_known_shape_has_its_name(tmp_path: Path) -> None:
    folder = tmp_path / "anything"
    folder.mkdir()
    config = json.loads((Path(__file__).parents[3] / "src/coterie/data/coterie-tiny/config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config))
    for path in (folder, folder / "config.json"):
        read, spec = model_config(path)
        assert read == config
        assert spec.name == "coterie-tiny"
    (folder / "config.json").write_text(json.dumps(config | {"num_experts": 16}))
    assert model_config(folder)[1].name != "coterie-tiny"


def test_a_trace_of_another_shape_is_refused() -> None:
    ids = np.zeros((3, 2, 1), np.uint8)
    trace = ActivationTrace.from_arrays(TraceMeta("other", 4, 2, 1), ids, np.array([0, 3]))
    with pytest.raises(ConfigError, match="the trace is of other with 2 MoE layers"):
        routed_tokens(SPEC, trace)
    assert len(routed_tokens(SPEC, None).ids) > 0


@pytest.mark.torch
def test_copies_take_time() -> None:
    torch = pytest.importorskip("torch")
    cells = measure_copies(torch.device("cpu"))
    assert {cell.path for cell in cells} == {"device"}
    assert all(math.isfinite(cell.us) and cell.us > 0 for cell in cells)
