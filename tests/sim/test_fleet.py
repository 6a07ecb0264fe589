"""The compiled fleet against a plain one, against hand computation and against queueing theory."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from coterie.batching import strategies
from coterie.batching.base import Loads, Selection, Window
from coterie.batching.picking import must_take
from coterie.costs.lines import StepCost
from coterie.costs.presets import step_model
from coterie.costs.step import Batch, StepModel
from coterie.errors import ConfigError
from coterie.footprints.counting import footprint
from coterie.models import get_model
from coterie.routing.base import Decision, Request
from coterie.routing.fleet import Fleet
from coterie.sim.fleet._steps import MOST_DECODING, step_counts
from coterie.sim.fleet.batching import Batching
from coterie.sim.fleet.metrics import FleetRun, LatencyLimits, summarise_fleet
from coterie.sim.fleet.requests import FleetRequests, Recordings
from coterie.sim.fleet.run import FleetConfig, run_fleet
from coterie.types import Link, ModelSpec, Placement, Topology
from fleet_checks import run_checked
from fleet_reference import Reference, StepTime
from fleet_steps import SPEC, by_bits, counted_us

MODEL = step_model(SPEC, "h200")
LINK = Link("slow", 2e9, 3e-4)


@dataclass(frozen=True)
class Emptiest:
    """The decoder with the fewest requests."""

    def route(self, request: Request, fleet: Fleet) -> Decision:  # noqa: ARG002  (the contract's)
        return Decision(int(np.argmin(fleet.running)), fleet.running.astype(np.float64), "fewest")


def recordings(rng: np.random.Generator, count: int, spec: ModelSpec = SPEC, longest: int = 9) -> Recordings:
    prompt, decode = rng.integers(1, longest, count), rng.integers(1, longest, count)
    first = np.concatenate([[0], np.cumsum(prompt + decode)[:-1]])
    shape = (int((prompt + decode).sum()), spec.num_moe_layers, spec.num_experts)
    ids = rng.random(shape).argsort(axis=2)[:, :, : spec.top_k].astype(np.uint8)
    shown = np.array([footprint(ids[at : at + rows], spec.num_experts) for at, rows in zip(first, prompt, strict=True)])
    return Recordings(ids, spec.num_experts, first, prompt, first + prompt, decode, shown)


def prefixes(rng: np.random.Generator, prompts: np.ndarray, block_tokens: int) -> tuple[np.ndarray, np.ndarray]:
    """Blocks of prompts that begin like one another: each one follows another's for a while."""
    made: list[list[int]] = []
    numbers = 0
    for tokens in prompts:
        needed = -(-int(tokens) // block_tokens)
        shared = made[rng.integers(len(made))][: rng.integers(needed + 1)] if made and rng.random() < 0.7 else []
        own = list(range(numbers, numbers + needed - len(shared)))
        numbers += len(own)
        made.append(shared + own)
    flat = [block for one in made for block in one]
    return np.concatenate([[0], np.cumsum([len(one) for one in made])]), np.array(flat, np.int64)


@st.composite
def cases(draw: st.DrawFn) -> tuple[FleetRequests, FleetConfig, int, str]:
    rng = np.random.default_rng(draw(st.integers(0, 10_000)))
    count, number = draw(st.integers(1, 24)), draw(st.integers(1, 8))
    prompts, outputs = rng.integers(1, 60, count), rng.integers(1, 12, count)
    block_tokens = draw(st.sampled_from([4, 16]))
    offsets, blocks = prefixes(rng, prompts, block_tokens) if draw(st.booleans()) else (None, None)
    in_flight = draw(st.sampled_from([0, 0, 1, 3, 7]))
    gap = draw(st.sampled_from([0.0, 1e-4, 1e-3]))
    times = None if in_flight else np.sort(rng.integers(0, 40, count)).astype(np.float64) * gap
    picked = rng.integers(number, size=count)
    requests = FleetRequests(recordings(rng, number), picked, prompts, outputs, times, offsets, blocks, block_tokens)
    both = draw(st.booleans())
    config = FleetConfig(
        decode_workers=draw(st.integers(1, 3)),
        prefill_workers=0 if both else draw(st.integers(0, 2)),
        both=both,
        places=draw(st.integers(1, 4)),
        prefill_places=draw(st.integers(1, 3)),
        chunk_tokens=draw(st.sampled_from([4, 17, 64])),
        kv_tokens=draw(st.sampled_from([None, 64, 160])),
        prefill_kv_tokens=draw(st.sampled_from([None, 48, 128])),
        link=draw(st.sampled_from([None, LINK])),
        prefill_policy=draw(st.sampled_from(["soonest", "least_queued", "round_robin"])),
        step_overhead_s=draw(st.sampled_from([0.0, 1e-4])),
        schedule_ahead=draw(st.booleans()),
    )
    return requests, config, in_flight, draw(st.sampled_from(["postpone", "allow"]))


TIMES = {
    "prefill_start": "prefill_start_s",
    "prefill_end": "prefill_end_s",
    "ready": "ready_s",
    "join": "decode_start_s",
    "first_token": "first_token_s",
    "finish": "finish_s",
}


def table_us(requests: FleetRequests, config: FleetConfig) -> StepTime:
    """Times as the compiled loop looks them up, of loads that the plain simulator counted."""
    tables = MODEL.tables(max(config.places, config.chunk_tokens)), step_counts(MODEL)
    most = min(MOST_DECODING, *MODEL.moe.tile_rows)

    def us(rows: list[int], load: np.ndarray, batch: Batch) -> float:
        if not batch.prefill_tokens and len(rows) <= most:
            return by_bits(*tables, requests.recordings.expert_ids[rows], SPEC.num_experts, batch.decode_context)[0]
        return counted_us(*tables, load.astype(np.uint32), batch)[0]

    return us


@st.composite
def batchings(draw: st.DrawFn, name: str) -> Batching:
    cost = StepCost(1.0, 10.0, 4.0, 0.1, 0.0, 1, False)  # experts' weights are nearly all of a step, so choosing pays
    strategy = strategies.make(name, {"cost": cost, "trust": 1.0}, max_skips=draw(st.sampled_from([1, 3, None])))
    return Batching(strategy, draw(st.integers(2, 12)), draw(st.integers(1, 4)), seed=3)


@given(st.data(), cases(), st.sampled_from([None, "fcfs", "random", "lpt", "latency_aware", "greedy_variance"]))
def test_equals_the_plain_simulator(
    data: st.DataObject, case: tuple[FleetRequests, FleetConfig, int, str], name: str | None
) -> None:
    """Every time, worker and count, to the last bit."""
    requests, config, in_flight, duplicates = case
    batching = None if name is None else data.draw(batchings(name))
    run = run_checked(
        requests, MODEL, Emptiest(), config, in_flight=in_flight or None, duplicates=duplicates, batching=batching
    )
    us = table_us(requests, config)
    plain = Reference(requests, SPEC, us, Emptiest(), config, in_flight, duplicates, batching).run()
    found = (run.step_worker, run.step_start_s, run.step_s, run.step_decoding, run.step_prefill, run.step_distinct)
    assert [tuple(step) for step in np.array(found, np.float64).T.tolist()] == plain.steps
    for name, field in TIMES.items():
        expected = [one.times.get(name, np.nan) for one in plain.asked]
        np.testing.assert_array_equal(getattr(run, field), expected, err_msg=name)
    assert run.cached_tokens.tolist() == [one.computes.cached for one in plain.asked]
    assert run.kept_tokens.tolist() == [one.gets.cached for one in plain.asked]
    assert run.decoder.tolist() == [one.decoder for one in plain.asked]
    assert run.dropped.tolist() == [one.dropped for one in plain.asked]


@given(cases(), batchings("fcfs"))
def test_first_come_first_served_changes_nothing(
    case: tuple[FleetRequests, FleetConfig, int, str], batching: Batching
) -> None:
    requests, config, in_flight, duplicates = case
    settings = {"in_flight": in_flight or None, "duplicates": duplicates}
    plain = run_fleet(requests, MODEL, Emptiest(), config, **settings)  # type: ignore[arg-type]
    run = run_fleet(requests, MODEL, Emptiest(), config, **settings, batching=batching)  # type: ignore[arg-type]
    for name, one, other in zip(FleetRun._fields, plain, run, strict=True):
        assert np.asarray(one).tobytes() == np.asarray(other).tobytes(), name


class Youngest:
    """As unfair as the contract allows: the oldest, the overdue, then the youngest."""

    max_skips = 3

    def __init__(self) -> None:
        self.choices = self.most_skips = 0

    def select(self, window: Window, running: Loads, size: int, rng: np.random.Generator) -> Selection:  # noqa: ARG002
        due = must_take(window, size, self.max_skips)
        youngest = [at for at in range(len(window.loads) - 1, -1, -1) if at not in due]
        order = [*due, *youngest][: min(size, len(window.loads))]
        self.choices += order != sorted(order)
        self.most_skips = max(self.most_skips, int(window.skipped.max()))
        return Selection(np.array(order), "the youngest")


LIMITS = {
    "places": {"places": 3},
    "memory": {"places": 12, "kv_tokens": 200},
    "memory, after prefill workers": {"places": 12, "kv_tokens": 200, "prefill_workers": 2, "link": LINK},
    "both roles": {"both": True, "places": 3, "chunk_tokens": 40},
    "both roles, memory": {"both": True, "places": 12, "chunk_tokens": 40, "kv_tokens": 200},
    "scheduled ahead": {"places": 3, "schedule_ahead": True},
}


def crowd() -> tuple[FleetRequests, FleetConfig]:
    """More requests than three workers of three places can serve as they come."""
    requests, config = closed(150, 3)
    return replace(requests, arrival_s=1e-4 * np.arange(150, dtype=np.float64)), config


@pytest.mark.parametrize("limit", LIMITS)
def test_a_strategy_chooses_and_nobody_starves(limit: str) -> None:
    requests, config = crowd()
    fleet, strategy = replace(config, **LIMITS[limit]), Youngest()  # type: ignore[arg-type]
    batching = Batching(strategy, window_size=16, batch_size=4)
    run = run_checked(requests, MODEL, Emptiest(), fleet, duplicates="allow", batching=batching)
    assert np.isfinite(run.finish_s).all()
    assert strategy.choices > 10
    assert strategy.most_skips == strategy.max_skips
    again = run_fleet(requests, MODEL, Emptiest(), fleet, duplicates="allow", batching=batching)
    assert again.finish_s.tobytes() == run.finish_s.tobytes()
    plain = run_fleet(requests, MODEL, Emptiest(), fleet, duplicates="allow")
    assert plain.finish_s.tobytes() != run.finish_s.tobytes()


def test_a_strategy_chooses_for_workers_that_are_groups_of_ranks() -> None:
    requests, config = closed(150, 3)
    requests, model = (
        replace(requests, arrival_s=1e-4 * np.arange(150, dtype=np.float64)),
        step_model(SPEC, "h200", topology=Topology(2)),
    )
    placement = Placement.linear(SPEC.num_moe_layers, SPEC.num_experts, 2, SPEC.num_experts + 2)
    cost = StepCost.for_phase(model, "decode", 6, 30, placement)
    cost = replace(cost, fixed_us=0.0, first_us=10.0)  # so that choosing pays for as small a model
    serve = partial(run_checked, requests, model, Emptiest(), config, duplicates="allow", placement=placement)
    plain = serve()
    in_order, chosen = (
        serve(batching=Batching(strategies.make(name, {"cost": cost, "trust": 1.0}), batch_size=4))
        for name in ("fcfs", "latency_aware")
    )
    assert in_order.finish_s.tobytes() == plain.finish_s.tobytes() != chosen.finish_s.tobytes()


def one_request(prompt: int, output: int) -> FleetRequests:
    made = recordings(np.random.default_rng(0), 1)
    return FleetRequests(made, np.zeros(1, np.int64), np.array([prompt]), np.array([output]), np.array([0.5]))


def seconds(model: StepModel, requests: FleetRequests, rows: list[int], batch: Batch) -> float:
    load = np.zeros((SPEC.num_moe_layers, SPEC.num_experts), np.int64)
    for row in rows:
        np.add.at(load, (np.arange(len(load))[:, None], requests.recordings.expert_ids[row]), 1)
    return model.step(load, batch).total_s


def test_one_request_by_hand() -> None:
    """10 prompt tokens in chunks of 6, KV over the link, 3 decode steps."""
    requests = one_request(10, 3)
    made = requests.recordings
    config = FleetConfig(prefill_workers=1, chunk_tokens=6, link=LINK, step_overhead_s=1e-3)
    run = run_checked(requests, MODEL, Emptiest(), config)
    prompt = [int(made.prompt_row[0] + at % made.prompt_rows[0]) for at in range(10)]
    first = seconds(MODEL, requests, prompt[:6], Batch(prefill_tokens=6)) + 1e-3
    second = seconds(MODEL, requests, prompt[6:], Batch(prefill_tokens=4, prefill_context=6)) + 1e-3
    computed = 0.5 + first + second
    assert run.prefill_start_s[0] == 0.5
    assert run.prefill_end_s[0] == pytest.approx(computed, rel=1e-9)
    ready = computed + LINK.latency_s + 10 * SPEC.kv_bytes_per_token / LINK.bytes_per_s
    assert run.ready_s[0] == pytest.approx(ready, rel=1e-9)
    times = [
        seconds(MODEL, requests, [int(made.decode_row[0] + at % made.decode_rows[0])], Batch(1, 10 + at)) + 1e-3
        for at in range(3)
    ]
    assert run.first_token_s[0] == pytest.approx(ready + times[0], rel=1e-9)
    assert run.finish_s[0] == pytest.approx(ready + sum(times), rel=1e-9)
    summary = summarise_fleet(run, LatencyLimits(ttft_s=10.0, tpot_s=1e-9))
    assert summary.ttft.p50 == pytest.approx(1e3 * (ready + times[0] - 0.5))
    assert summary.tpot.p999 == pytest.approx(1e3 * (times[1] + times[2]) / 2)
    assert summary.within_limits == 0.0
    assert summarise_fleet(run, LatencyLimits(ttft_s=10.0)).within_limits == 1.0


def test_a_worker_of_both_roles_gives_the_first_token_with_the_prompt() -> None:
    requests = one_request(10, 3)
    run = run_checked(requests, MODEL, Emptiest(), FleetConfig(both=True, chunk_tokens=256))
    assert run.first_token_s[0] == run.prefill_end_s[0]
    assert run.step_decoding.tolist() == [0, 1, 1]
    assert run.decoded[0] == 2


def test_a_shared_prefix_is_computed_once() -> None:
    made = recordings(np.random.default_rng(0), 2)
    requests = FleetRequests(
        made,
        np.arange(2),
        np.array([32, 40]),
        np.array([1, 1]),
        np.array([0.0, 9.0]),
        np.array([0, 2, 5]),
        np.array([0, 1, 0, 1, 2]),
        16,
    )
    run = run_checked(requests, MODEL, Emptiest(), FleetConfig(prefill_workers=2))
    assert run.cached_tokens.tolist() == [0, 32]
    assert run.prefiller.tolist() == [0, 0]
    assert run.step_prefill.sum() == 32 + 8


def test_a_decoder_gets_only_the_kv_that_it_lacks() -> None:
    """Three prompts that share 32 tokens, one after the other: the second decoder lacks them, the first does not."""
    made = recordings(np.random.default_rng(0), 3)
    blocks = np.array([0, 1, 0, 1, 2, 0, 1, 3])
    lengths, arrivals = np.array([32, 40, 48]), np.array([0.0, 9.0, 18.0])
    requests = FleetRequests(
        made, np.arange(3), lengths, np.array([2, 2, 2]), arrivals, np.array([0, 2, 5, 8]), blocks, 16
    )
    seen: list[list[int]] = []

    class ByTurn:
        def route(self, request: Request, fleet: Fleet) -> Decision:
            assert request.cached_tokens is not None
            assert request.prefilled
            seen.append(request.cached_tokens.tolist())
            return Decision((0, 1, 0)[len(seen) - 1], np.zeros(len(fleet)), "by turn")

    config = FleetConfig(prefill_workers=1, decode_workers=2, link=LINK, kv_tokens=256)
    run = run_checked(requests, MODEL, ByTurn(), config)
    assert seen == [[0, 0], [32, 0], [32, 32]]
    assert run.kept_tokens.tolist() == [0, 0, 32]
    sent = run.ready_s - run.prefill_end_s - LINK.latency_s
    np.testing.assert_allclose(sent, np.array([32, 40, 16]) * SPEC.kv_bytes_per_token / LINK.bytes_per_s, rtol=1e-9)


def test_prompts_that_begin_alike_do_not_all_queue_at_one_worker() -> None:
    """One block of 16 tokens in common, 48 of their own: a cache is worth its tokens, and no more."""
    count = 40
    own = 1 + np.arange(3 * count).reshape(count, 3)
    blocks = np.concatenate([np.zeros((count, 1), np.int64), own], axis=1).ravel()
    requests = FleetRequests(
        recordings(np.random.default_rng(0), count),
        np.arange(count),
        np.full(count, 64),
        np.full(count, 2),
        np.arange(count, dtype=np.float64) * 1e-6,
        4 * np.arange(count + 1),
        blocks,
        16,
    )
    run = run_checked(requests, MODEL, Emptiest(), FleetConfig(prefill_workers=4))
    each = np.bincount(run.prefiller, minlength=4)
    assert each.sum() == count
    assert each.max() - each.min() <= 2


def closed(count: int, places: int, number: int = 40) -> tuple[FleetRequests, FleetConfig]:
    rng = np.random.default_rng(1)
    made = recordings(rng, number, longest=40)
    picked = rng.integers(number, size=count)
    requests = FleetRequests(made, picked, np.full(count, 20), made.decode_rows[picked])
    return requests, FleetConfig(decode_workers=3, places=places)


def test_no_recording_is_in_flight_twice() -> None:
    requests, config = closed(200, 4)
    run = run_checked(requests, MODEL, Emptiest(), config, in_flight=12)
    assert np.isfinite(run.finish_s).all()
    assert run.most_in_flight == 12
    order = np.argsort(run.arrival_s, kind="stable")
    assert (np.diff(order) != 1).any(), "some were passed over: this run would not tell"
    crowded = replace(requests, arrival_s=np.zeros(200))
    with pytest.raises(ConfigError, match=r"request \d+ replays recording \d+, which is in flight already"):
        run_fleet(crowded, MODEL, Emptiest(), config)
    run = run_checked(crowded, MODEL, Emptiest(), config, duplicates="postpone")
    assert run.postponed == 200 - len(np.unique(requests.recorded))
    assert np.isfinite(run.finish_s).all()


def test_the_same_run_twice_has_the_same_bytes() -> None:
    requests, config = closed(150, 4)
    runs = [run_fleet(requests, MODEL, Emptiest(), config, in_flight=12) for _ in range(2)]
    for one, other in zip(*runs, strict=True):
        assert np.asarray(one).tobytes() == np.asarray(other).tobytes()


def test_littles_law() -> None:
    """Mean in flight = rate x mean time, of the fleet and of every decoder."""
    requests, config = closed(400, 4)
    run = run_fleet(requests, MODEL, Emptiest(), config, in_flight=12)
    summary = summarise_fleet(run)
    rate = len(run.finish_s) / run.end_s
    assert summary.mean_in_flight == pytest.approx(rate * (run.finish_s - run.arrival_s).mean(), rel=1e-9)
    assert summary.worker_in_flight.sum() == pytest.approx(summary.mean_in_flight, rel=1e-9)
    full = summarise_fleet(run, since_s=0.2 * run.end_s, until_s=0.8 * run.end_s)
    assert full.mean_in_flight == pytest.approx(12, rel=1e-9)
    assert full.mean_batch == pytest.approx(4, rel=0.02)


def test_waits_at_a_prefill_worker_are_those_of_md1() -> None:
    """Equal prompts one at a time: Pollaczek-Khinchine, within three standard errors of batch means."""
    made = recordings(np.random.default_rng(0), 1)
    count, rng, load = 30_000, np.random.default_rng(3), 0.6
    config = FleetConfig(prefill_workers=1, prefill_places=1, chunk_tokens=64)

    def run(times: np.ndarray) -> FleetRun:
        many = np.zeros(len(times), np.int64)
        requests = FleetRequests(made, many, many + 8, many + 1, times)
        return run_fleet(requests, MODEL, Emptiest(), config, duplicates="allow", fleet=Fleet([256]))

    service = float(run(np.zeros(1)).step_s[0])
    found = run(np.cumsum(rng.exponential(service / load, count)))
    waits = (found.prefill_start_s - found.arrival_s)[: count // 100 * 100].reshape(100, -1).mean(axis=1)
    theory = load / (2 * (1 - load)) * service
    error = waits.std(ddof=1) / 10
    assert error < 0.05 * theory, "too few requests to tell 10 % from chance"
    assert abs(waits.mean() - theory) < 3 * error


def test_until_counts_who_is_left() -> None:
    requests, config = closed(300, 4)
    whole = run_fleet(requests, MODEL, Emptiest(), config, in_flight=12)
    cut = run_checked(requests, MODEL, Emptiest(), config, in_flight=12, until_s=whole.end_s / 2)
    done = np.isfinite(cut.finish_s)
    assert cut.end_s == whole.end_s / 2
    assert done.sum() + cut.running + cut.queued == np.isfinite(cut.arrival_s).sum()
    assert cut.running + cut.queued == 12
    np.testing.assert_array_equal(cut.finish_s[done], whole.finish_s[done])


def test_a_faster_decoder_is_faster_and_a_request_too_large_is_dropped() -> None:
    requests = one_request(10, 3)
    slow = run_fleet(requests, MODEL, Emptiest(), FleetConfig())
    fast = run_fleet(requests, MODEL, Emptiest(), FleetConfig(speeds=(2.0,)))
    np.testing.assert_allclose(slow.step_s, 2 * fast.step_s)
    small = run_checked(requests, MODEL, Emptiest(), FleetConfig(kv_tokens=12))
    assert small.dropped.all()
    assert not len(small.step_s)


@dataclass(frozen=True)
class Profiling:
    """Says of every request that it activates each expert as often as any other."""

    def route(self, request: Request, fleet: Fleet) -> Decision:
        even = np.full(fleet.missed.shape[1], SPEC.top_k / SPEC.num_experts, np.float32)
        return Decision(int(request.id) % len(fleet), np.zeros(len(fleet)), "in turn", even)


EVEN = np.full((3, SPEC.num_moe_layers * SPEC.num_experts), SPEC.top_k / SPEC.num_experts)
"""[worker, expert index] the prior of workers that get any request."""


def test_profiles_are_kept_and_let_go() -> None:
    requests, config = closed(60, 4)
    fleet = Fleet([4] * 3, EVEN)
    run = run_fleet(requests, MODEL, Profiling(), config, in_flight=12, fleet=fleet, until_s=0.02)
    assert run.running + run.queued == 12 == fleet.running.sum()
    assert (fleet.missed < 255).any()
    fleet = Fleet([4] * 3, EVEN)
    run_fleet(requests, MODEL, Profiling(), config, in_flight=12, fleet=fleet)
    assert fleet.running.sum() == 0


@dataclass(frozen=True)
class Astray:
    def route(self, request: Request, fleet: Fleet) -> Decision:  # noqa: ARG002  (the contract's)
        return Decision(7, np.zeros(len(fleet)), "nowhere")


def test_bad_input_is_named() -> None:
    requests, config = closed(10, 4)
    with pytest.raises(ConfigError, match="the router chose worker 7; it must be in 0 … 2"):
        run_fleet(requests, MODEL, Astray(), config, in_flight=2)
    with pytest.raises(ConfigError, match="give either requests with arrival_s"):
        run_fleet(requests, MODEL, Emptiest(), config)
    with pytest.raises(ConfigError, match="fleet has 2 workers and 0 requests; expected 3"):
        run_fleet(requests, MODEL, Emptiest(), config, in_flight=2, fleet=Fleet([4, 4]))
    with pytest.raises(ConfigError, match="recordings have shape"):
        run_fleet(requests, step_model(get_model("gpt-oss-20b")), Emptiest(), config, in_flight=2)
    with pytest.raises(ConfigError, match="prefill_workers=1 must be 0 where workers do both"):
        FleetConfig(both=True, prefill_workers=1)
    with pytest.raises(ConfigError, match="chunk_tokens=4 must be at least places=8"):
        FleetConfig(both=True, places=8, chunk_tokens=4)
    with pytest.raises(ConfigError, match="prefill_policy='best' must be one of soonest"):
        FleetConfig(prefill_policy="best")  # type: ignore[arg-type]
    twice = FleetRequests(
        requests.recordings,
        np.zeros(1, np.int64),
        np.array([32]),
        np.array([1]),
        np.zeros(1),
        np.array([0, 2]),
        np.array([3, 3]),
        16,
    )
    with pytest.raises(ConfigError, match="a prompt holds one block twice"):
        run_fleet(twice, MODEL, Emptiest(), config)
