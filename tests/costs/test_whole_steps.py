"""Fits of whole steps: a law is found again in its own steps."""

from __future__ import annotations

import numpy as np
import pytest

from coterie.costs.attention import attention_shape, attention_us
from coterie.costs.cells import StepCell
from coterie.costs.experts import layer_us
from coterie.costs.roofline import Quality, RooflineLaw
from coterie.costs.whole_steps import _expert_work, _Experts, fit_steps
from coterie.errors import ConfigError
from coterie.models import get_model

SPEC = get_model("gpt-oss-20b")
PLACES = 132
HEAD_US = 300.0
FLOPS_PER_US = 5e8
SIZES = (128, 512, 1024, 2048, 4096, 8192)


def even(rows: int, distinct: int, rng: np.random.Generator) -> np.ndarray:
    """[layer, expert] tokens that go round `distinct` experts, others in every layer."""
    load = np.zeros((SPEC.num_moe_layers, SPEC.num_experts), np.int64)
    for layer in load:
        layer[rng.permutation(SPEC.num_experts)[:distinct]] = np.bincount(np.arange(4 * rows) % distinct)
    return load


def drawn(rows: int, rng: np.random.Generator) -> np.ndarray:
    share = rng.dirichlet(np.full(SPEC.num_experts, 0.7), SPEC.num_moe_layers)
    return np.stack([rng.multinomial(4 * rows, one) for one in share])


def prompt_us(tokens: int, prompts: int) -> float:
    """The rest of a prompt's step by the law: projections, attention and head."""
    law = RooflineLaw(1e-3, 1e12, FLOPS_PER_US, 30.0, Quality(0.0, 0.0, 0)).numbers()
    none = np.zeros(1)
    attention = float(attention_us(attention_shape(SPEC), law, law, 0, none, tokens, none, prompts)[0])
    return 900 + 7 * 64 + 3.0 * (tokens - 64) + attention + HEAD_US


@pytest.mark.parametrize(
    ("split", "tiles"), [((), (64, 128)), ((16, 32), (64, 128)), ((16,), (128, 128)), ((32,), (32, 64))]
)
def test_a_law_is_found_again_in_its_own_steps(split: tuple[int, ...], tiles: tuple[int, int]) -> None:
    rng = np.random.default_rng(1)
    decode = rng.uniform(1.0, 4.0, 2 + len(split)) if split else np.array([18.0])
    if split:
        decode[0] = 11.0
    truth = _Experts(SPEC, "bf16", split, decode, PLACES)
    params = truth._params(tiles, (14.0, 20.0), 512)
    p = params.array(SPEC.expert_bytes("bf16"), 2.0 * SPEC.expert_params)
    cells = []
    for number in range(180):
        rows = (1, 2, 8, 24, 48, 64)[number % 6]
        distinct = min(int(rng.choice([4, 5, 6, 8, 12, 20, 32])), 4 * rows)
        cached = float(rows * rng.choice([128, 2048]))
        cell = StepCell(rows, 0, cached, even(rows, distinct, rng), True, 1.0, 1.0, np.nan)
        us = 900 + 7 * rows + 6e-3 * cached + float(decode @ _expert_work(cell, SPEC, split, PLACES))
        cells.append(cell._replace(us=us + HEAD_US, forward_us=us))
    for size in SIZES:
        loads = [(even(size, 32, rng), True), *((drawn(size, rng), False) for _ in range(3))]
        for load, is_even in loads:
            experts = sum(layer_us(p, row, float(size)) for row in load.astype(float))
            us = prompt_us(size, 1) + experts
            cells.append(StepCell(size, 1, 0.0, load, is_even, us, us - HEAD_US, np.nan))
        for prompts in (1, 8):
            us = prompt_us(size + 8, prompts)
            none = np.zeros_like(loads[0][0])
            cells.append(StepCell(size + 8, prompts, 0.0, none, True, us, us - HEAD_US, np.nan))
    fit = fit_steps(SPEC, "bf16", cells, "engine 1", PLACES)
    found = fit.moe.params
    assert (found.waves is None) == bool(split)
    assert fit.moe.held_out.worst_pct < 0.1
    assert found.tile_rows[-2:] == tiles or set(found.tile_rows[-2:]) == set(tiles)
    assert fit.rest.held_out.worst_pct < 1.0
    assert fit.prefill_attention.flops_per_us == pytest.approx(FLOPS_PER_US, rel=0.02)
    assert fit.head.us(16) == pytest.approx(HEAD_US, rel=1e-3)


def test_prompts_that_waited_for_the_host_are_left_out() -> None:
    rng = np.random.default_rng(0)
    cells = [
        StepCell(rows, 0, 100.0 * rows, even(rows, 4, rng), True, 1000.0 + rows + HEAD_US, 1000.0 + rows, np.nan)
        for rows in (1, 2, 4, 8)
        for _ in range(4)
    ]
    load, none = even(1024, 32, rng), np.zeros((24, 32), np.int64)
    for tokens, us, head in ((1024, 9000.0, HEAD_US), (2048, 16000.0, HEAD_US)):
        cells.append(StepCell(tokens, 1, 0.0, load * (tokens // 1024), True, us, us - head, np.nan))
        cells.append(StepCell(tokens, 1, 0.0, load * (tokens // 1024), False, us, us - head, np.nan))
    cells.append(StepCell(520, 1, 0.0, none, True, 9000.0, 9000.0 - 4 * HEAD_US, np.nan))
    cells.append(StepCell(2056, 1, 0.0, none, True, 4000.0, 4000.0 - HEAD_US, np.nan))
    assert 520.0 not in fit_steps(SPEC, "bf16", cells, "engine 1", PLACES).rest.at


def test_too_little_is_refused() -> None:
    one = StepCell(1, 0, 10.0, even(1, 4, np.random.default_rng(0)), True, 500.0, 400.0, np.nan)
    with pytest.raises(ConfigError, match="too few steps"):
        fit_steps(SPEC, "bf16", [one, one._replace(tokens=2)], "engine 1", PLACES)
