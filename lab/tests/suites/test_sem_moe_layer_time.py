from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from coterie.answers.suites import SuiteOptions
from coterie.costs.exchange import expected_locality
from coterie.costs.presets import step_model
from coterie.costs.step import Batch
from coterie.models import get_model
from coterie.types import NVLINK4, Placement, Topology
from coterie_lab.suites.sem_moe import layer_time
from coterie_lab.suites.sem_moe.layer_time import DISPATCHES, PART, RANKS, RATES, locality_at


@pytest.fixture(scope="module")
def rows() -> list[dict[str, Any]]:
    return layer_time.layer_time_rows(SuiteOptions(), lambda *_: None)


def test_every_regime_has_every_rate_and_less_crosses_as_it_rises(rows: list[dict[str, Any]]) -> None:
    regimes = (
        len(layer_time.MODELS) * sum(map(len, layer_time.TOKENS.values())) * len(layer_time.LINKS) * len(DISPATCHES)
    )
    rates = [row for row in rows if row["part"] == PART]
    assert len(rates) == regimes * (1 + len(RATES))
    for start in range(0, len(rates), 1 + len(RATES)):
        mine = rates[start : start + 1 + len(RATES)]
        assert [row["local_activation_rate"] for row in mine] == [1 / RANKS, *RATES]
        assert (np.diff([row["layer_us"] for row in mine]) < 0).all()
        assert mine[0]["saving_pct"] == 0.0
        assert mine[-1]["all_to_all_us"] == 0.0
        assert mine[-1]["saving_pct"] == pytest.approx(mine[0]["communication_pct"])
        assert all(row["communication_of_step_pct"] <= row["communication_pct"] for row in mine)


def test_single_copies_take_no_longer(rows: list[dict[str, Any]]) -> None:
    keys = ("part", "model", "tokens_per_rank", "link", "local_activation_rate")
    by: dict[Any, dict[str, float]] = {}
    for row in rows:
        if row["part"] == PART:
            by.setdefault(tuple(row[key] for key in keys), {})[row["dispatch"]] = row["all_to_all_us"]
    assert all(one["deduplicated"] <= one["per activation"] * (1 + 1e-9) for one in by.values())


@pytest.mark.parametrize("name", layer_time.MODELS)
def test_the_rate_of_chance_is_uniform_routing(name: str) -> None:
    spec = get_model(name)
    ours, uniform = locality_at(1 / RANKS, spec), expected_locality(spec, Topology(RANKS))
    assert ours.local == pytest.approx(uniform.local)
    assert ours.remote == pytest.approx(uniform.remote)
    assert ours.remote_ranks == pytest.approx(uniform.remote_ranks, rel=0.03), "local experts counted at their mean"
    assert locality_at(1.0, spec).remote_ranks == 0.0


def test_a_layer_and_the_rest_are_a_step() -> None:
    """All MoE layers and what lies between them take what StepModel.step says for even load."""
    spec = get_model("deepseek-v2-lite")
    model = step_model(spec, "h200", "bf16", Topology(RANKS, intra=NVLINK4))
    tokens, layers = 64, spec.num_moe_layers
    load = np.full((layers, spec.num_experts), RANKS * tokens * spec.top_k // spec.num_experts)
    placement = Placement.linear(layers, spec.num_experts, RANKS)
    whole = model.step(load, Batch(tokens, tokens * 1024), placement)
    ours = layers * (layer_time.compute_us(model, tokens) + layer_time.rest_us(model, "decode", tokens))
    assert 1e-6 * ours == pytest.approx(whole.total_s - whole.all_to_all_s.sum())
    found = layer_time.layer_time(model, tokens, 1 / RANKS, DISPATCHES[0])
    assert 1e-6 * found.all_to_all_us == pytest.approx(whole.all_to_all_s[0])


def test_the_exchange_is_an_eighth_of_decode_on_nvlink(rows: list[dict[str, Any]]) -> None:
    """What the page on joint routing counts on recorded steps: 12.9% of DeepSeek-V2-Lite's decode."""
    mine = [
        row["communication_of_step_pct"]
        for row in rows
        if row["part"] == PART
        and (row["model"], row["phase"], row["link"]) == ("deepseek-v2-lite", "decode", NVLINK4.name)
        and row["local_activation_rate"] == 1 / RANKS
    ]
    assert min(mine) > 12.0
    assert max(mine) < 15.0


def test_both_readings_of_the_published_rise(rows: list[dict[str, Any]]) -> None:
    savings = [row for row in rows if row["part"] == layer_time.SAVING and row["model"] == "deepseek-v2-lite"]
    assert {row["reading"] for row in savings} == {"points", "ratio"}
    for row in savings:
        wanted = 0.125 + 0.37 if row["reading"] == "points" else 0.125 * 1.37
        assert row["local_activation_rate"] == pytest.approx(wanted)
        assert row["published"] == {"saving_pct": 41.8, "rise": 37.0}
        assert row["saving_pct"] < 41.8, "fewer bytes alone do not give the published saving"


def test_words_and_figure(rows: list[dict[str, Any]], tmp_path: Path) -> None:
    notes = layer_time.layer_time_notes(rows)
    text = " ".join(notes)
    assert "Co-scheduling cannot pay much here" in next(note for note in notes if note.startswith("decode on nvlink4"))
    assert "Co-scheduling can pay here" in next(note for note in notes if note.startswith("prefill on nvlink4"))
    assert "59.2%" in text
    assert "read as points" in text
    assert "read as ratio" in text
    drawn = layer_time.draw_layer_time(tmp_path, rows)
    assert [path.name for path in drawn] == [f"{layer_time.FIGURE}.{kind}" for kind in ("pdf", "png")]
