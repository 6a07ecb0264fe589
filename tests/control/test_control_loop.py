"""The loop on made traffic: it notices a shift, fits anew, takes what is better and nothing else."""

from __future__ import annotations

import json
import pickle
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from control_traffic import (
    BATCH,
    NEW,
    OLD,
    SETTINGS,
    SHAPE,
    band,
    calibration_of,
    drive,
    fitted,
    loop_of,
    made_requests,
)
from coterie.control import KINDS, ControlLoop, ControlSettings, FitJob, LoopShape, RequestSeen, Tick
from coterie.control.traffic import Traffic, drift_ratio, reference_of, sample_of
from coterie.errors import ConfigError
from coterie.routing import RouterFit


@pytest.fixture(scope="module")
def old_fit() -> RouterFit:
    return fitted(made_requests(np.random.default_rng(0), OLD, 64))


@pytest.fixture(scope="module")
def new_fit() -> RouterFit:
    return fitted(made_requests(np.random.default_rng(9), NEW, 128))


def until_job(loop: ControlLoop, seen: list[RequestSeen]) -> tuple[Tick, list[RequestSeen]]:
    """Drive up to the first job; what was not observed yet is returned with it."""
    for at, one in enumerate(seen):
        loop.observe(one)
        tick = loop.tick(one.at_s)
        if tick.job is not None:
            return tick, seen[at + 1 :]
    raise AssertionError("no job was started")


def test_an_abrupt_shift_is_noticed_and_the_new_fit_is_taken(old_fit: RouterFit) -> None:
    rng, loop = np.random.default_rng(1), loop_of(old_fit)
    assert drive(loop, made_requests(rng, OLD, 96)) == ["no_drift"]
    kinds = drive(loop, made_requests(rng, NEW, 160, 96))
    assert kinds[:3] == ["drift", "refit_started", "refit_taken"]
    taken = next(event for event in loop.events if event.kind == "refit_taken")
    assert float(taken.values["saving_pct"]) > 5
    assert float(taken.values["bound_pct"]) > 0
    assert taken.at_s < 96 + 160, "drift, fit and score within 160 requests"
    assert loop.fit is not old_fit
    assert loop.counters["swaps"] == 1
    assert set(kinds) <= set(KINDS)


def test_steady_traffic_gives_no_swap(old_fit: RouterFit) -> None:
    loop = loop_of(old_fit)
    kinds = drive(loop, made_requests(np.random.default_rng(2), OLD, 700))
    assert "refit_taken" not in kinds
    assert "drift" not in kinds
    assert loop.fit is old_fit


def test_a_worse_fit_is_not_taken(old_fit: RouterFit, new_fit: RouterFit) -> None:
    """A job comes back with a fit to other traffic than what comes."""
    rng, loop = np.random.default_rng(3), loop_of(old_fit)
    tick, rest = until_job(loop, made_requests(rng, OLD, 300))  # there are several times as many requests as it had
    assert tick.job is not None
    loop.candidate(new_fit, 0.1)
    assert "refit_kept" in drive(loop, rest)
    assert loop.fit is old_fit
    kept = next(event for event in loop.events if event.kind == "refit_kept")
    assert float(kept.values["saving_pct"]) < 0


def test_a_candidate_is_scored_on_requests_that_neither_fit_has_seen(
    old_fit: RouterFit, monkeypatch: pytest.MonkeyPatch
) -> None:
    rng, loop = np.random.default_rng(4), loop_of(old_fit)
    scored: list[list[int]] = []
    compare = loop.scorer.compare

    def listening(in_force: RouterFit, candidate: RouterFit, requests: Any, *others: Any) -> Any:
        scored.append([one.serial for one in requests])
        return compare(in_force, candidate, requests, *others)

    monkeypatch.setattr(loop.scorer, "compare", listening)
    tick, rest = until_job(loop, made_requests(rng, NEW, 300))
    assert tick.job is not None
    loop.candidate(tick.job.run(), 0.1)
    drive(loop, rest)
    assert scored
    assert min(scored[0]) > max(tick.job.calibration.requests)


def test_it_falls_back_when_the_old_traffic_returns(old_fit: RouterFit) -> None:
    rng, loop = np.random.default_rng(5), loop_of(old_fit, replace(SETTINGS, growth=1000))
    for one in made_requests(rng, NEW, 400):
        if "refit_taken" in drive(loop, [one]):
            break
    kinds = drive(loop, made_requests(rng, OLD, 96, loop.traffic.serial))
    assert "fall_back" in kinds
    assert loop.fit is old_fit


def test_nothing_is_done_on_few_requests(old_fit: RouterFit) -> None:
    settings = replace(SETTINGS, min_requests=200, fit_requests=400)
    loop = loop_of(old_fit, settings)
    kinds = drive(loop, made_requests(np.random.default_rng(6), NEW, 150))
    assert kinds == ["drift", "too_little"]


def test_cooldown_and_one_job_at_a_time(old_fit: RouterFit) -> None:
    rng, loop = np.random.default_rng(7), loop_of(old_fit, replace(SETTINGS, cooldown_s=500.0))
    _, rest = until_job(loop, made_requests(rng, NEW, 200))
    for one in rest:
        loop.observe(one)
        assert loop.tick(one.at_s).job is None, "the job has not come back"
    loop.fit_failed("out of memory")
    kinds = drive(loop, made_requests(rng, OLD, 128, 200))
    assert kinds[0] == "refit_failed"
    assert "cooldown" in kinds
    assert "refit_started" not in kinds
    kinds = drive(loop, made_requests(rng, OLD, 64, 700))
    assert "refit_started" in kinds


def test_a_candidate_grows_too_old(old_fit: RouterFit) -> None:
    loop = loop_of(old_fit, replace(SETTINGS, candidate_s=100.0))
    tick, rest = until_job(loop, made_requests(np.random.default_rng(8), NEW, 200))
    assert tick.job is not None
    loop.candidate(tick.job.run(), 0.1)
    told = loop.tick(rest[0].at_s + 200.0)
    assert [event.kind for event in told.events] == ["refit_kept"]
    assert told.use is None


def test_a_swap_that_fails_leaves_the_fit_in_force(old_fit: RouterFit) -> None:
    loop, use = loop_of(old_fit), None
    for one in made_requests(np.random.default_rng(1), NEW, 300):
        loop.observe(one)
        tick = loop.tick(one.at_s)
        if tick.job is not None:
            loop.candidate(tick.job.run(), 0.1)
        if tick.use is not None:
            use = tick.use
            loop.swap_failed(one.at_s, "the pool is gone")
    assert use is not None
    assert loop.fit is old_fit
    assert loop.counters["swaps_failed"] >= 1
    assert "swaps" not in loop.counters


def test_resizing_drops_what_was_fitted_for_other_workers(old_fit: RouterFit) -> None:
    rng, loop = np.random.default_rng(11), loop_of(old_fit)
    tick, rest = until_job(loop, made_requests(rng, NEW, 400))
    assert tick.job is not None
    loop.resize(3)
    assert loop.fit.workers == 3
    assert loop.status()["workers"] == 3
    loop.candidate(tick.job.run(), 0.1)
    assert loop.events[-1].kind == "refit_kept"
    assert "3" in loop.events[-1].reason
    drive(loop, rest)
    assert loop.fit.workers == 3
    assert all(event.kind in KINDS for event in loop.events)
    loop.resize(0)
    assert loop.counters["ignored_workers"] == 1
    assert loop.shape.workers == 3


def test_time_that_goes_back_decides_nothing(old_fit: RouterFit) -> None:
    loop = loop_of(old_fit)
    loop.tick(10.0)
    for wrong in (5.0, float("nan"), float("inf"), True):
        tick = loop.tick(wrong)
        assert tick.job is None
        assert tick.use is None
    assert loop.counters["ignored_clock"] == 4
    assert [event.kind for event in loop.events] == ["ignored"], "one event for a run of them"


def test_a_job_is_pure_and_keeps_clusters_on_their_workers(old_fit: RouterFit) -> None:
    known = calibration_of(made_requests(np.random.default_rng(12), OLD, 64))
    job = FitJob(known, SHAPE.workers, BATCH, 3, like=old_fit.profiles)
    again: FitJob = pickle.loads(pickle.dumps(job))
    first, second = job.run(), again.run()
    assert np.array_equal(first.profiles, second.profiles)
    kept = np.abs(first.profiles - old_fit.profiles).sum(axis=1)
    crossed = np.abs(first.profiles[::-1] - old_fit.profiles).sum(axis=1)
    assert (kept < crossed).all()


def test_drift_ratio_is_near_one_for_the_same_traffic(old_fit: RouterFit) -> None:
    ratios: list[float] = []
    others: list[float] = []
    for seed in range(12):
        for groups, found in ((OLD, ratios), (NEW, others)):
            traffic = Traffic(SHAPE, SETTINGS)
            for one in made_requests(np.random.default_rng([seed, 13]), groups, SETTINGS.window):
                traffic.add(one)
            found.append(drift_ratio(traffic.windows[-1], reference_of(old_fit)))
    assert 0.4 < np.mean(ratios) < 1.6
    assert min(others) > 10


def test_a_flooding_worker_does_not_push_out_the_others(old_fit: RouterFit) -> None:
    rng, loop = np.random.default_rng(14), loop_of(old_fit)
    good = made_requests(rng, OLD, 200)
    drive(loop, good)
    one = good[0]
    for at in range(2000):
        loop.observe(one._replace(at_s=200.0, request_id=f"flood{at}", worker="w9"))
    kept = [kept for kept in loop.traffic.kept if kept.worker != "w9"]
    assert len(kept) == 200
    assert len(loop.traffic.kept) <= loop.traffic.most


def test_status_is_plain_json(old_fit: RouterFit) -> None:
    loop = loop_of(old_fit)
    drive(loop, made_requests(np.random.default_rng(15), NEW, 200))
    assert json.loads(json.dumps(loop.status()))["kept_requests"] == 200


def test_wrong_construction_is_refused(old_fit: RouterFit) -> None:
    with pytest.raises(ConfigError, match="layers"):
        ControlLoop(SHAPE._replace(num_layers=5), old_fit, band)
    with pytest.raises(ConfigError, match="top_k=99"):
        ControlLoop(LoopShape("made", 4, 16, 99, 2), old_fit, band)
    with pytest.raises(ConfigError, match="fit_requests"):
        ControlSettings(fit_requests=10)
    with pytest.raises(ConfigError, match="score_requests"):
        ControlSettings(score_requests=8)


def test_samples_of_one_request_have_no_scatter() -> None:
    traffic = Traffic(SHAPE, SETTINGS)
    traffic.add(made_requests(np.random.default_rng(16), OLD, 1)[0])
    assert sample_of(list(traffic.kept)).scatter == 0.0


def test_what_is_no_fit_is_not_scored(old_fit: RouterFit, new_fit: RouterFit) -> None:
    seen = made_requests(np.random.default_rng(1), NEW, 100)
    for wrong in (None, RouterFit(2), new_fit.widened(3)):
        loop = loop_of(old_fit)
        until_job(loop, seen)
        loop.candidate(wrong, 0.1)  # type: ignore[arg-type]
        assert loop.events[-1].kind == "refit_failed"
        assert loop.fit is old_fit


def test_a_router_that_raises_when_scored_is_told(old_fit: RouterFit) -> None:
    def broken(_fit: RouterFit) -> Any:
        raise ValueError("no such router")

    loop = ControlLoop(SHAPE, old_fit, broken, SETTINGS, batch=BATCH)
    kinds = drive(loop, made_requests(np.random.default_rng(1), NEW, 160))
    assert "refit_failed" in kinds
    assert "no such router" in next(event.reason for event in loop.events if event.kind == "refit_failed")
    assert loop.fit is old_fit


def test_events_of_nonsense_do_not_push_out_decisions(old_fit: RouterFit) -> None:
    loop = loop_of(old_fit)
    for one in made_requests(np.random.default_rng(17), OLD, 96):
        loop.observe(one)
        for _ in range(20):
            loop.observe(one)  # doubled, between good ones
        loop.tick(one.at_s)
    assert [event.kind for event in loop.events].count("ignored") == 2, "once a minute"
    assert loop.counters["ignored_doubled"] == 20 * 96
