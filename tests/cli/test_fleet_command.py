"""``coterie fleet`` as a user runs it, and what it counts."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from command_line import Run, refused
from coterie.answers.fleet.simulation import FleetReport, FleetRow, FleetSettings, simulate_fleet
from coterie.answers.verdicts import HARDLY, NOT, PAYS, UNTOLD
from coterie.costs.presets import step_model
from coterie.errors import ConfigError
from coterie.models import get_model
from coterie.routing import RouterFit, calibration, routers
from coterie.traces import ActivationTrace
from coterie.traces.arrivals import LognormalLengths
from coterie.traces.synthetic import SyntheticSettings, generate_to
from coterie.types import Interval

MODEL = "gpt-oss-20b"
TAIL = Interval(2.0, 1.0, 3.0)
SMALL = ("--decoders", 2, "--in-flight", 4, "--requests", 64)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("fleet") / "trace"
    settings = SyntheticSettings(specialisation=0.9, lengths=LognormalLengths(16, 0.3, 24, 0.3, 48), model=MODEL)
    settings = settings.shaped_like(get_model(MODEL))
    generate_to(place, settings, np.random.default_rng(0), requests=60)
    return place


@pytest.fixture(scope="module")
def trace(folder: Path) -> ActivationTrace:
    return ActivationTrace.open(folder)


def answer(run: Run, *arguments: object) -> dict[str, Any]:
    ran = run("fleet", *arguments, "--json")
    assert (ran.code, ran.err) == (0, "")
    found = json.loads(ran.out)
    assert isinstance(found, dict)
    return found


def test_every_router_is_compared(run: Run, folder: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    ran = run("fleet", folder, *SMALL, "--splits", 1, "--dtype", "bf16", "--dtype", "mxfp4", "--out", out)
    assert ran.code == 0, ran.err
    for name in routers.names():
        assert name in ran.out
    for dtype in ("bf16", "mxfp4"):
        assert f"{MODEL} in {dtype} on h200: 2 decoders" in ran.out
    assert {path.name for path in out.iterdir()} == {"fleet.json", "fleet.png", "fleet.pdf"}
    *_, verdict, then = ran.out.strip().splitlines()
    assert "TPOT" in verdict or "No router" in verdict
    assert then.startswith("Next: coterie ")
    written = json.loads((out / "fleet.json").read_text())
    assert [one["dtype"] for one in written["fleets"]] == ["bf16", "mxfp4"]
    again = run("fleet", folder, *SMALL, "--splits", 1, "--router", "latency_aware", "--out", out)
    assert again.code == 0, "its own result is replaced"
    assert "one split" in again.out


def test_settings_follow_a_routers_name_and_memory_is_said(run: Run, folder: Path) -> None:
    found = answer(run, folder, *SMALL, "--splits", 1, "--router", "joint:experts=0", "--router", "joint")
    fleet = found["fleets"][0]
    assert {row["router"] for row in fleet["rows"]} == {"join_shortest_queue", "joint:experts=0", "joint"}
    assert any("a decoder holds the KV cache of about" in note for note in fleet["notes"])
    for verb in (("fleet", folder, *SMALL), ("demo",)):
        refused(run(*verb, "--router", "joint:expert=0"), "'joint' has no setting 'expert'; did you mean 'experts'?")


def test_a_strangers_file_is_not_replaced(run: Run, folder: Path, tmp_path: Path) -> None:
    (tmp_path / "fleet.png").write_text("mine")
    ran = run("fleet", folder, *SMALL, "--out", tmp_path)
    assert ran.code == 2
    assert "exists and is not a result of coterie fleet" in ran.err
    assert (tmp_path / "fleet.png").read_text() == "mine"
    assert len(list(tmp_path.iterdir())) == 1


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--router", "latency-aware"), "Did you mean 'latency_aware'"),
        (("--base", "fastest"), "Unknown router 'fastest'"),
        (("--dtype", "int3"), "weight_dtype='int3' must be one of"),
        (("--preset", "h300"), "Unknown preset 'h300'"),
        (("--model", "gpt-oss-2b"), "Did you mean 'gpt-oss-20b'"),
        (("--model", "qwen3-30b-a3b"), "the trace has 24 layers of 32 experts"),
        (("--decoders", "9", "--in-flight", "4"), "half of the trace has 30: record more"),
        (("--decoders", "2", "--in-flight", "4", "--requests", "8"), "must be at least 16, twice what is in flight"),
        (("--rate", "0"), "rate=0.0 must be a finite number above 0"),
        (("--rate", "nan"), "rate=nan must be a finite number above 0"),
        (("--arrivals", "never"), "must be closed, trace, or a file of requests"),
        (("--decoders", "0"), "greater than or equal to 1"),
        (("--fitted", "nothing.safetensors"), "does not exist"),
        (("--exchange", "1"), "need --gateways of at least 2"),
        (("--told", "counts"), "need --gateways of at least 2"),
        (("--gateways", "65"), "less than or equal to 64"),
        (("--gateways", "2", "--exchange", "inf"), "less than or equal to 86400"),
        (("--gateways", "2", "--exchange", "1e-310"), "must be 0 or at least 1e-06"),
        (("--gateways", "2", "--told", "all"), "told='all' must be one of profiles, counts"),
    ],
)
def test_bad_settings_are_one_line(run: Run, folder: Path, arguments: tuple[str, ...], said: str) -> None:
    ran = run("fleet", folder, *arguments)
    assert ran.code == 2
    assert ran.out == ""
    assert said in ran.err
    assert len(ran.err.strip().splitlines()) == 1


@pytest.mark.parametrize("arguments", [("--arrivals", "trace"), ("--rate", "40", "--prefill", "1")])
def test_requests_arrive_by_a_clock(run: Run, folder: Path, arguments: tuple[str, ...]) -> None:
    found = answer(run, folder, *SMALL, "--splits", 2, "--router", "latency_aware", *arguments)
    (fleet,) = found["fleets"]
    assert [row["router"] for row in fleet["rows"]] == ["join_shortest_queue", "latency_aware"]
    assert all(row["ttft_p50_ms"] > 0 for row in fleet["rows"])
    assert 0 < fleet["in_flight"] < 100
    assert found["arrivals"] != "closed loop"


def test_several_gateways_are_said(run: Run, folder: Path) -> None:
    several = ("--gateways", 3, "--exchange", 0.5, "--told", "counts", "--router", "latency_aware", "--splits", 1)
    found = answer(run, folder, *SMALL, *several)
    assert found["gateways"] == {"count": 3, "every_s": 0.5, "told": "counts", "seed": 0}
    assert "3 gateways (counts each 0.5 s)" in run("fleet", folder, *SMALL, *several).out


def test_overload_is_said(trace: ActivationTrace) -> None:
    model = step_model(get_model(MODEL), "h200")
    settings = FleetSettings(1, 4, rate=5000.0, requests=120, splits=1, routers=("latency_aware",))
    notes = " ".join(simulate_fleet(trace, model, settings).notes)
    assert "arrivals waited because their recording was in flight" in notes
    assert "Fewer than 200 requests were measured" in notes


def test_a_fitted_router_serves_what_it_has_not_seen(run: Run, folder: Path, tmp_path: Path) -> None:
    file = tmp_path / "router.safetensors"
    assert run("fit", folder, "--workers", 2, "--batch", 4, "-o", file).code == 0
    found = answer(run, folder, *SMALL, "--splits", 2, "--fitted", file, "--router", "latency_aware")
    (fleet,) = found["fleets"]
    assert fleet["recorded"] == 10, "30% of 60 requests were held out; 8 are in flight, and a quarter more"
    assert any("do not cover other fits" in note for note in fleet["notes"])
    assert all(row["saved_pct"]["low"] is not None for row in fleet["rows"])
    found = answer(run, folder, *SMALL, "--splits", 1, "--fitted", file, "--router", "latency_aware")
    assert found["fleets"][0]["recorded"] == 18, "one split serves them all"
    ran = run("fleet", folder, "--decoders", 4, "--in-flight", 2, "--fitted", file)
    assert (ran.code, "was fitted for 2 workers; the fleet has 4" in ran.err) == (2, True)
    ran = run("fleet", folder, "--decoders", 2, "--in-flight", 12, "--fitted", file)
    assert "those that the router was not fitted on are 18" in ran.err


def test_a_router_that_has_seen_everything_is_refused(trace: ActivationTrace, tmp_path: Path) -> None:
    known = calibration(trace)
    fitted = RouterFit(2, batch=4).fit(known, np.random.default_rng(0))
    fitted.save(tmp_path / "all")
    again = RouterFit.load(tmp_path / "all")
    model = step_model(get_model(MODEL), "h200")
    settings = FleetSettings(2, 4, requests=64, splits=1, routers=("latency_aware",), fitted=again)
    with pytest.raises(ConfigError, match="fitted on every request of this trace"):
        simulate_fleet(trace, model, settings)
    assert again.learned_ is not None
    again.learned_ = again.learned_._replace(seen=None)
    assert any("may look too good" in note for note in simulate_fleet(trace, model, settings).notes)


def test_a_digest_follows_the_request(trace: ActivationTrace) -> None:
    known = calibration(trace)
    order = np.random.default_rng(1).permutation(len(known.requests))
    np.testing.assert_array_equal(known.take(order).digests, known.digests[order])
    assert len(np.unique(known.digests)) == len(known.requests)


def test_a_router_that_cannot_be_made_is_left_out(trace: ActivationTrace) -> None:
    bare = ActivationTrace(trace.meta, trace.segments, replace(trace.requests, domains=None))
    model = step_model(get_model(MODEL), "h200")
    settings = FleetSettings(2, 4, requests=64, splits=1)
    found = simulate_fleet(bare, model, settings)
    assert list(found.skipped) == ["domain", "semantic"], "no labels; decoders are no ranks of one group"
    assert "domain" not in [row.router for row in found.rows]
    with pytest.raises(ConfigError, match="router 'domain' needs labels"):
        simulate_fleet(bare, model, replace(settings, routers=("domain",)))


def row(name: str, saved: Interval, tail: Interval) -> FleetRow:
    return FleetRow(name, 20.0, 5.0, 6.0, 5.0, 5.0, 6.0, saved, tail, saved)


def report(saved: Interval, tail: Interval = TAIL, splits: int = 6) -> FleetReport:
    zero = Interval(0.0, 0.0, 0.0)
    rows = [row("join_shortest_queue", zero, zero), row("latency_aware", saved, tail)]
    return FleetReport("m", "bf16", 8, 16, 0, 64, splits, 200, 900, rows)


@pytest.mark.parametrize(
    ("found", "opening", "said"),
    [
        (
            report(Interval(5.4, 4.9, 5.9)),
            PAYS,
            "off mean TPOT against join_shortest_queue, 95% 4.9 to 5.9; p99 no worse.",
        ),
        (report(Interval(5.4, 4.9, 5.9), Interval(-4.0, -5.0, -3.0)), PAYS, "p99 4.0% longer"),
        (report(Interval(5.4, 4.9, 5.9), Interval(0.0, -5.0, 5.0)), PAYS, "p99 cannot be told (-5.0 to +5.0% saved)"),
        (report(Interval(0.5, 0.4, 0.6)), HARDLY, "takes 0.5% off"),
        (report(Interval(0.4, 0.2, 0.6), Interval(-1.7, -2.4, -1.0)), NOT, "p99 1.7% longer, more than it saves."),
        (report(Interval(2.0, -1.0, 5.0)), UNTOLD, "95% -1.0 to 5.0"),
        (report(Interval(-2.0, -3.0, -1.0)), NOT, "adds 2.0% to mean TPOT against join_shortest_queue, 95% 1.0 to 3.0"),
        (report(Interval(5.0, None, None), Interval(1.0, None, None), splits=1), UNTOLD, "no interval: one split."),
        (report(Interval(5.0, None, None)), UNTOLD, "no interval: every split serves all requests"),
    ],
)
def test_the_verdict(found: FleetReport, opening: str, said: str) -> None:
    assert found.pays is (opening == PAYS)
    where = "for m in bf16 on 8 decoders, 16 requests on each"
    assert found.verdict.startswith(f"{opening} {where}: latency_aware ")
    assert said in found.verdict


def test_a_router_whose_p99_outweighs_its_gain_is_not_the_best() -> None:
    found = report(Interval(0.4, 0.2, 0.6), Interval(-1.7, -2.4, -1.0))
    harmless = row("locality_band", Interval(0.2, 0.1, 0.3), TAIL)
    both = replace(found, rows=[*found.rows, harmless])
    assert both.best is harmless
    assert "locality_band takes 0.2% off" in both.verdict


def test_a_router_alone_is_compared_with_nothing() -> None:
    found = report(Interval(5.4, 4.9, 5.9))
    alone = replace(found, rows=found.rows[:1])
    assert not alone.pays
    assert alone.verdict.startswith(UNTOLD)
    assert "only join_shortest_queue ran" in alone.verdict
