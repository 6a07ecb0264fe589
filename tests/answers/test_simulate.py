"""What-if runs: against queueing theory and plain counting, and what is refused."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from coterie.answers.batches.drawn import DRAWN
from coterie.answers.batches.options import SimulateOptions
from coterie.answers.batches.requests import arrive, recorded, synthetic
from coterie.answers.batches.servers import SpreadServer, StepServer, make_strategy
from coterie.answers.batches.what_if import MAX_BYTES, simulate
from coterie.batching import LatencyAware, strategies
from coterie.batching.base import SpreadCost
from coterie.batching.scheduler import SchedulerConfig
from coterie.costs.lines import StepCost
from coterie.costs.presets import step_model
from coterie.errors import ConfigError, InputError, TraceError, UnknownNameError
from coterie.models import get_model
from coterie.sim.metrics import summarise_run
from coterie.traces import ActivationTrace, LoadTable, RequestTrace, TraceMeta
from coterie.types import Placement, Topology
from sim_checks import checked
from simulate_traces import make_trace, quiet, rng


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    make_trace(times=True).save(tmp_path / "trace")
    return tmp_path / "trace"


# ------------------------------------------------------------------------------------------------- the servers


def config_file(folder: Path, **scheduler: Any) -> Path:
    (folder / "caps.json").write_text(json.dumps({"num_experts": 60, "top_k_experts": 4, "scheduler": scheduler}))
    return folder / "caps.json"


def test_one_by_one_it_is_the_queue_of_theory(tmp_path: Path) -> None:
    """M/D/1: a mean wait of rho / (2 (1 - rho)) services."""
    config = config_file(tmp_path, strategy="fcfs", max_batch_size=1, window_size=1, min_batch_trigger=1)
    options = SimulateOptions(config=config, base_ms=10.0, sensitivity=0.0, rate=60.0, requests=12_000, seed=3)
    found = simulate(options, quiet)
    [row] = found.rows
    rho = 0.6
    assert found.settings["capacity"] == pytest.approx(100.0, rel=1e-6)
    assert found.settings["load"] == pytest.approx(rho, rel=1e-6)
    assert row["mean_ms"] == pytest.approx(10.0 * (1 + rho / (2 * (1 - rho))), rel=0.04)
    assert row["imbalance"] == 1.0


def test_a_run_is_what_its_parts_give(tmp_path: Path) -> None:
    """The same numbers from the pieces of the library, and every number of a row."""
    config = config_file(tmp_path, strategy="greedy_variance", max_skips=None)
    found = simulate(SimulateOptions(config=config, rate=150.0, requests=300, seed=4), quiet)
    requests, arrived = synthetic(60, 4, None, 300, np.random.default_rng([4, 1]))
    scheduler = SchedulerConfig(strategy="greedy_variance", max_skips=None)
    server = SpreadServer(scheduler, requests, arrived.row, DRAWN.base_s * 1e3, SpreadCost(DRAWN.sensitivity))
    for row in found.rows:
        strategy = make_strategy(row["strategy"], server)
        run = checked(server.run)(strategy, arrived.at(150.0), np.random.default_rng([4, 2]))
        for name, value in summarise_run(run)._asdict().items():
            assert row[name] == value, name
    base, ours = found.rows
    assert ours["p99_reduction_pct"] == pytest.approx(100 * (1 - ours["p99_ms"] / base["p99_ms"]))
    assert ours["throughput_gain_pct"] == pytest.approx(100 * (ours["throughput"] / base["throughput"] - 1))
    assert base["p99_reduction_pct"] == base["throughput_gain_pct"] == 0.0


def test_published_gains_in_overload() -> None:
    """Bursty, 150 requests a second: throughput of the greedy strategies +12.7% as published, within 3 points."""
    names = ("greedy_variance", "random")
    options = SimulateOptions(arrivals="bursty", rate=150.0, requests=1500, strategies=names, seed=42)
    found = simulate(options, quiet)
    by = {row["strategy"]: row for row in found.rows}
    assert list(by) == ["fcfs", "greedy_variance", "random"]
    assert by["greedy_variance"]["throughput_gain_pct"] == pytest.approx(12.7, abs=3.0)
    assert 0 < by["random"]["throughput_gain_pct"] < by["greedy_variance"]["throughput_gain_pct"]
    assert found.settings["load"] > 1
    assert any("Overload" in note for note in found.notes)


@pytest.fixture(scope="module")
def gpt_oss() -> ActivationTrace:
    """A made trace in the shape of a known model."""
    return make_trace(requests=24, prompt=40, output=12, meta=TraceMeta("gpt-oss-20b", 32, 24, 4))


@pytest.mark.parametrize("phase", ["prefill", "decode"])
@pytest.mark.parametrize("ranks", [1, 4])
def test_every_strategy_serves_everyone_under_the_step_model(gpt_oss: ActivationTrace, phase: str, ranks: int) -> None:
    spec = get_model("gpt-oss-20b")
    placement = Placement.linear(spec.num_moe_layers, spec.num_experts, ranks) if ranks > 1 else None
    model = step_model(spec, "h200", None, Topology(ranks))
    requests = recorded(gpt_oss, "made", phase, "recorded", rng())
    arrived = arrive(requests, "poisson", 60, rng())
    config = SchedulerConfig(min_batch_trigger=1)
    server = StepServer(config, requests, arrived.row, phase, model, placement, "h200", 8)
    for name in strategies.names():
        run = checked(server.run)(make_strategy(name, server), arrived.at(1000.0), rng())
        if name == "fcfs":
            assert (np.diff(run.start_s) >= 0).all()
            assert run.skipped.max() == 0
        if ranks == 1:
            assert (run.imbalance == 1.0).all()


def test_the_fitting_cost_goes_to_latency_aware(gpt_oss: ActivationTrace) -> None:
    model = step_model(get_model("gpt-oss-20b"), "h200")
    requests = recorded(gpt_oss, "made", "decode", "recorded", rng())
    row = np.arange(len(requests.counts))
    server = StepServer(SchedulerConfig(max_skips=7), requests, row, "decode", model, None, "h200", 16)
    chosen = make_strategy("latency_aware", server)
    assert isinstance(chosen, LatencyAware)
    assert (chosen.cost, chosen.max_skips) == (server.cost, 7)
    assert requests.context is not None
    assert server.cost == StepCost.for_phase(model, "decode", 16, round(float(requests.context.mean())))
    assert not server.cost.by_tokens
    assert StepCost.for_phase(model, "prefill", 16, 500).by_tokens
    spread = SpreadServer(SchedulerConfig(), requests, row, 1.0, SpreadCost(0.5))
    chosen = make_strategy("latency_aware", spread)
    assert isinstance(chosen, LatencyAware)
    assert chosen.cost == SpreadCost(0.5)


def test_a_cost_of_several_ranks_is_of_one_ranks_share() -> None:
    spec = get_model("gpt-oss-20b")
    placement = Placement.linear(spec.num_moe_layers, spec.num_experts, 4)
    one = StepCost.for_phase(step_model(spec, "h200"), "decode", 8, 100)
    four = StepCost.for_phase(step_model(spec, "h200", None, Topology(4)), "decode", 32, 100, placement)
    assert (one.num_ranks, four.num_ranks) == (1, 4)
    assert four.fixed_us == pytest.approx(one.fixed_us)  # attention and projections of 8 requests each
    assert four.arrival_us > one.arrival_us == 0


# ------------------------------------------------------------------------------------------------- the whole


def test_the_execution_follows_the_trace(tmp_path: Path, gpt_oss: ActivationTrace) -> None:
    gpt_oss.save(tmp_path / "known")
    make_trace().save(tmp_path / "unknown")
    make_trace(meta=TraceMeta("gpt-oss-20b", 32, 2, 4)).save(tmp_path / "part")
    known = simulate(SimulateOptions(trace=tmp_path / "known", requests=20), quiet)
    assert (known.settings["execution"], known.settings["model"]) == ("decode", "gpt-oss-20b")
    assert known.settings["rate"] == pytest.approx(0.8 * known.settings["capacity"])
    assert simulate(SimulateOptions(trace=tmp_path / "unknown", requests=20), quiet).settings["execution"] == "spread"
    part = simulate(SimulateOptions(trace=tmp_path / "part", requests=20), quiet)
    assert part.settings["execution"] == "spread"
    assert any("(2, 32, 4)" in note for note in part.notes)
    named = SimulateOptions(trace=tmp_path / "known", requests=20, execution="prefill", model="gpt-oss-20b", ranks=2)
    assert simulate(named, quiet).settings["ranks"] == 2


def test_the_weights_of_a_config_are_timed(tmp_path: Path, gpt_oss: ActivationTrace) -> None:
    gpt_oss.save(tmp_path / "known")
    (tmp_path / "c.json").write_text('{"quantization": "bf16", "scheduler": {"strategy": "lpt"}}')
    found = simulate(SimulateOptions(trace=tmp_path / "known", config=tmp_path / "c.json", requests=20), quiet)
    assert (found.settings["dtype"], found.settings["measured"]) == ("bf16", True)
    assert [row["strategy"] for row in found.rows] == ["fcfs", "lpt"]
    assert found.settings["experts"] == 32, "a config that does not say how many experts claims nothing"


def test_times_of_another_trace(tmp_path: Path, saved: Path) -> None:
    RequestTrace(np.ones(4, int), np.ones(4, int), np.array([0.0, 1.0, 1.0, 5.0])).save(tmp_path / "times")
    for options in (
        SimulateOptions(trace=saved, arrivals=str(tmp_path / "times"), requests=4),
        SimulateOptions(trace=tmp_path / "times", requests=4),
    ):
        found = simulate(options, quiet)
        np.testing.assert_array_equal(found.runs["fcfs"].arrival_s, [0.0, 1.0, 1.0, 5.0])
        assert found.settings["rate"] == pytest.approx(0.6)
        faster = replace(options, rate=6.0)
        np.testing.assert_allclose(simulate(faster, quiet).runs["fcfs"].arrival_s, [0.0, 0.1, 0.1, 0.5])


def test_the_same_seed_is_the_same_run(saved: Path) -> None:
    options = SimulateOptions(trace=saved, requests=50, strategies=("all",), predictor="domain")
    one, two = (simulate(options, quiet).to_json() for _ in range(2))
    assert one == two
    other = simulate(SimulateOptions(trace=saved, requests=50, predictor="domain", seed=1), quiet)
    assert other.rows[0] != one["rows"][0]
    assert [row["strategy"] for row in one["rows"]] == ["fcfs", *(n for n in strategies.names() if n != "fcfs")]


def test_one_request_is_enough() -> None:
    found = simulate(SimulateOptions(requests=1), quiet)
    assert found.rows[0]["requests"] == 1
    assert found.settings["rate"] is None
    json.dumps(found.to_json(), allow_nan=False)


def test_progress_reaches_its_end() -> None:
    seen = []
    simulate(SimulateOptions(requests=40), lambda *heard: seen.append(heard))
    dones = [done for _, done, _ in seen]
    assert dones == sorted(dones)
    assert seen[-1][1] == seen[-1][2] == 3 * 40


# ------------------------------------------------------------------------------------------------- bad input


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"execution": "decod"}, "Did you mean 'decode'?"),
        ({"requests": 0}, "requests=0 must be at least 1"),
        ({"rate": float("nan")}, "rate=nan must be a finite number above 0"),
        ({"rate": 0.0}, "rate=0.0"),
        ({"seed": -1}, "seed=-1"),
        ({"ranks": 2}, "--ranks is for execution prefill or decode"),
        ({"places": 2}, "--places is for execution decode"),
        ({"model": "gpt-oss-20b"}, "--model is for execution prefill or decode"),
        ({"sensitivity": -1.0}, "sensitivity=-1.0"),
        ({"strategies": ("greedy",)}, "Known: best_fit"),
        ({"arrivals": "poison"}, "arrivals='poison' must be poisson, bursty, or a trace"),
        ({"execution": "decode"}, "needs recorded experts"),
        ({"predictor": "domain"}, "predictor='domain' needs recorded requests"),
        ({"prompts": "p.txt"}, "name it with --with-model"),
        ({"trace": "t", "with_model": "m"}, "exclude each other"),
        ({"requests": 1 + MAX_BYTES // 480}, "must be at most 2048"),
    ],
)
def test_bad_settings(change: dict[str, Any], said: str) -> None:
    with pytest.raises(InputError, match=re.escape(said)) as raised:
        simulate(SimulateOptions(**change), quiet)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"predictor": "dry_run"}, "Unknown predictor 'dry_run'"),
        ({"execution": "decode"}, "'made' is none: give --model"),
        ({"model": "gpt-oss-20b"}, "(2, 12, 3)"),
        ({"model": "gpt-oss-21b"}, "Did you mean"),
        ({"base_ms": -1.0}, "base_ms=-1.0"),
    ],
)
def test_bad_settings_for_a_trace(saved: Path, change: dict[str, Any], said: str) -> None:
    with pytest.raises(InputError, match=re.escape(said)):
        simulate(SimulateOptions(trace=saved, requests=5, **change), quiet)


def test_a_config_of_other_experts(tmp_path: Path, saved: Path) -> None:
    with pytest.raises(ConfigError, match=r"caps.json: num_experts=60 must equal 12, that of .*trace"):
        simulate(SimulateOptions(trace=saved, config=config_file(tmp_path)), quiet)


def test_traces_that_lack_what_is_asked(tmp_path: Path) -> None:
    LoadTable(np.ones((1, 2, 8), np.uint64)).save(tmp_path / "load")
    RequestTrace(np.ones(3, int), np.ones(3, int)).save(tmp_path / "untimed")
    RequestTrace(np.ones(3, int), np.ones(3, int), np.zeros(3)).save(tmp_path / "at-once")
    plain = make_trace(token_ids=False, domains=False)
    plain.save(tmp_path / "plain")
    for options, error, said in (
        ({"trace": tmp_path / "load"}, TraceError, "kind: found 'load'"),
        ({"trace": tmp_path / "untimed"}, TraceError, "no arrival times"),
        ({"arrivals": str(tmp_path / "load")}, ConfigError, "has no requests"),
        ({"trace": tmp_path / "at-once", "arrivals": "poisson"}, ConfigError, "without experts"),
        ({"trace": tmp_path / "at-once", "rate": 3.0}, ConfigError, "arrive at one time"),
        ({"trace": tmp_path / "plain", "predictor": "token_table"}, ConfigError, "no token_ids"),
        ({"trace": tmp_path / "plain", "predictor": "domain"}, ConfigError, "no domains"),
        ({"trace": tmp_path / "plain", "arrivals": "bursty"}, ConfigError, "no domains"),
        ({"trace": tmp_path / "plain", "predictor": "oracle"}, UnknownNameError, "Known: domain"),
    ):
        with pytest.raises(error, match=re.escape(said)):
            simulate(SimulateOptions(requests=5, **options), quiet)
    found = simulate(SimulateOptions(trace=tmp_path / "at-once", requests=3), quiet)
    assert found.settings["rate"] is None
    assert any("at once" in note for note in found.notes)
