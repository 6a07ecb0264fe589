"""``import coterie``: what it offers, that it is quick, and its example from end to end."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import coterie
from coterie.answers.verdicts import HARDLY, PAYS
from coterie.costs.lines import DecodeStepPrices
from coterie.errors import ConfigError, TraceError, UnknownNameError
from coterie.footprints import footprint
from coterie.routing import RouterFit, routers
from coterie.traces import ActivationTrace, RequestTrace
from coterie.traces.arrivals import LognormalLengths
from coterie.traces.synthetic import SyntheticSettings, generate
from coterie.types import PREFILL

NAMES = [
    "CoterieError",
    "Fleet",
    "Load",
    "ModelSpec",
    "Placement",
    "Request",
    "Topology",
    "__version__",
    "fit_router",
    "load_router",
    "open_trace",
    "plan",
    "simulate",
    "step_model",
]
MODEL = "gpt-oss-20b"


def test_what_it_offers() -> None:
    assert coterie.__all__ == NAMES
    assert dir(coterie) == NAMES
    for name in NAMES:
        assert getattr(coterie, name) is not None
    with pytest.raises(AttributeError, match="'routers'"):
        coterie.routers  # noqa: B018


def test_importing_is_quick() -> None:
    """Neither numba nor torch is imported, nor what they bring."""
    source = "import sys, coterie; print(*sorted({'numba', 'torch', 'scipy', 'matplotlib'} & set(sys.modules)))"
    ran = subprocess.run([sys.executable, "-c", source], capture_output=True, text=True, check=False)
    assert (ran.returncode, ran.stdout.strip(), ran.stderr) == (0, "", "")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    lengths = LognormalLengths(16, 0.3, 16, 0.3, 32)
    settings = SyntheticSettings(specialisation=0.9, lengths=lengths, model=MODEL)
    path = tmp_path_factory.mktemp("traffic") / "trace"
    generate(settings, np.random.default_rng(0), requests=48).save(path)
    return path


@pytest.fixture(scope="module")
def trace(folder: Path) -> ActivationTrace:
    opened = coterie.open_trace(folder)
    assert isinstance(opened, ActivationTrace)
    return opened


@pytest.fixture(scope="module")
def fitted(trace: ActivationTrace) -> RouterFit:
    return coterie.fit_router(trace, workers=3)


def test_the_example_routes(trace: ActivationTrace, fitted: RouterFit, tmp_path: Path) -> None:
    model = coterie.step_model(MODEL, device="h200")
    fitted.save(tmp_path / "router.safetensors")
    loaded = coterie.load_router(tmp_path / "router.safetensors", model=MODEL, workers=3)
    counts = footprint(trace.request(0).only(PREFILL), trace.meta.num_experts)
    choices = []
    for one in (fitted, loaded):
        router, fleet = one.router("latency_aware", model), one.fleet(places=64)
        choices.append(router.route(coterie.Request(prompt_tokens=300, footprint=counts), fleet))
    assert choices[0].worker in range(3)
    assert choices[0].reason == choices[1].reason
    np.testing.assert_array_equal(choices[0].scores, choices[1].scores)


def test_the_example_plans(trace: ActivationTrace) -> None:
    load = sum(footprint(trace.request(n).expert_ids, trace.meta.num_experts) for n in range(trace.num_requests))
    assert isinstance(load, np.ndarray)
    model, topology = coterie.step_model(MODEL, device="h200"), coterie.Topology(4)
    layers, experts = load.shape
    current = coterie.Placement.linear(layers, experts, topology.num_ranks)
    plan = coterie.plan(load, topology, current, model=model, horizon=10_000)
    same = coterie.plan(coterie.Load(load.astype(np.float64)), topology, model=model, horizon=10_000)
    np.testing.assert_array_equal(plan.placement.slot_experts, same.placement.slot_experts)
    assert 0 < plan.after_s <= plan.before_s
    assert (plan.skip_reason is None) == bool(len(plan.moves))
    kept = coterie.plan(load, topology, current, model=model, horizon=0.0)
    assert kept.skip_reason


def test_the_example_simulates(trace: ActivationTrace) -> None:
    report = coterie.simulate(
        trace, decoders=2, in_flight=4, model=coterie.step_model(MODEL, device="h200"), splits=2, requests=48
    )
    assert [row.router for row in report.rows] == ["join_shortest_queue", "latency_aware"]
    base, best = report.rows
    assert report.best is best, "the only one beside the base, whatever it saves"
    assert {base.router, best.router} <= set(report.verdict.replace(",", " ").split())
    surely = best.saved_pct.low is not None and best.saved_pct.low > 0
    assert report.verdict.startswith((PAYS, HARDLY)) == surely


def test_wrong_calls_fail_loudly(trace: ActivationTrace, fitted: RouterFit, tmp_path: Path) -> None:
    model = coterie.step_model(MODEL)
    requests = RequestTrace(np.array([3, 4]), np.array([1, 1]))
    with pytest.raises(ConfigError, match="RequestTrace"):
        coterie.fit_router(requests, workers=2)
    with pytest.raises(ConfigError, match="RequestTrace"):
        coterie.simulate(requests, model=model)
    with pytest.raises(ConfigError, match="'latency_aware' needs fitted"):
        routers.make("latency_aware")
    with pytest.raises(ConfigError, match=r"needs cost.*DecodeStepPrices\.of"):
        routers.make("latency_aware", {"fitted": fitted})
    assert routers.make("latency_aware", {"fitted": fitted, "cost": DecodeStepPrices.of(model)})
    with pytest.raises(ConfigError, match=r"'latency_aware' has no setting 'band'.*fitted, cost"):
        fitted.router("latency_aware", model, band=0.1)
    with pytest.raises(UnknownNameError, match="Did you mean 'latency_aware'"):
        fitted.router("latency-aware", model)
    with pytest.raises(UnknownNameError, match="Unknown router 'fastest'"):
        coterie.simulate(trace, model=model, routers=("fastest",))
    with pytest.raises(ConfigError, match="half of the trace has 24"):
        coterie.simulate(trace, model=model)
    with pytest.raises(ConfigError, match="need"):
        coterie.fit_router(trace, workers=1000)
    with pytest.raises(UnknownNameError, match="Did you mean 'gpt-oss-20b'"):
        coterie.step_model("gpt-oss-2b")
    with pytest.raises(TraceError, match="does not exist"):
        coterie.open_trace(tmp_path / "nowhere")
    fitted.save(tmp_path / "router.safetensors")
    for wanted in ({"model": "mixtral-8x7b"}, {"workers": 4}):
        with pytest.raises(coterie.CoterieError):
            coterie.load_router(tmp_path / "router.safetensors", **wanted)
    with pytest.raises(ConfigError, match="placement"):
        coterie.plan(np.ones((2, 8)), coterie.Topology(2), coterie.Placement.linear(1, 8, 2), model=model)
