from __future__ import annotations

from collections import deque
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from coterie.costs.exchange import ring_time
from coterie.costs.presets import step_model
from coterie.costs.step import Batch, CostOptions, StepModel
from coterie.errors import ConfigError
from coterie.sim.fleet.requests import FleetRequests, Recordings
from coterie.sim.group import LockstepGroup
from coterie.sim.group.prompts import deal_layers
from coterie.sim.group.serving import (
    MOST_AHEAD,
    PASSES,
    GroupPrices,
    GroupServedRun,
    Rebalance,
    ServeSettings,
    ServingGroup,
    sharded,
    summarise_served,
)
from coterie.types import INFINIBAND_400G, NVLINK4, ModelSpec, Placement, Topology
from sim_checks import InvariantError, check_served

SMALL = ModelSpec("small", 3, 8, 2, 64, 32, 4, 2, 16, 1000, first_moe_layer=1)
RANKS, LAYERS = 4, 2
SETTINGS = ServeSettings(prompt_tokens=40, places=3, chunk_tokens=24, piece_tokens=16)


def small_model(**changes: Any) -> StepModel:
    return step_model(SMALL, "h200", "bf16", Topology(RANKS), **changes)


def recordings(rng: np.random.Generator, count: int = 6, rows: int = 12) -> Recordings:
    ids = np.array([[rng.permutation(8)[:2] for _ in range(LAYERS)] for _ in range(count * rows)], np.uint8)
    first = np.arange(count) * rows
    return Recordings(ids, 8, first, np.full(count, 7), first + 7, np.full(count, rows - 7))


def drawn(records: Recordings, count: int, rng: np.random.Generator, prompt: int = 40, most: int = 6) -> FleetRequests:
    outputs = rng.integers(1, most, count)
    return FleetRequests(records, rng.integers(0, len(records), count), np.full(count, prompt), outputs)


def shuffled_placement(rng: np.random.Generator) -> Placement:
    return Placement(np.array([rng.permutation(8) for _ in range(LAYERS)], np.int32), RANKS, 8)


class Plain:
    """The same group, request by request in plain Python, timed by Group.mixed_step."""

    def __init__(self, group: LockstepGroup, requests: FleetRequests, settings: ServeSettings) -> None:
        self.group, self.requests, self.settings = group, requests, settings
        cuts = list(range(0, settings.prompt_tokens, settings.piece_tokens))
        self.pieces = [range(at, min(at + settings.piece_tokens, settings.prompt_tokens)) for at in cuts]

    def row(self, request: int, at: int, prompt: bool) -> int:
        records, recorded = self.requests.recordings, int(self.requests.recorded[request])
        first, length = (
            (records.prompt_row, records.prompt_rows) if prompt else (records.decode_row, records.decode_rows)
        )
        return int(first[recorded]) + at % int(length[recorded])

    def serve(self, arrival_s: NDArray[np.float64], ranks: NDArray[np.int64]) -> Any:
        count, clock, settings = len(arrival_s), 0.0, self.settings
        waiting = [deque(np.flatnonzero(ranks == rank).tolist()) for rank in range(RANKS)]
        running: list[list[int]] = [[] for _ in range(RANKS)]
        done, decoded = [0] * count, [0] * count
        first, finish, steps = np.full(count, np.nan), np.full(count, np.nan), []
        while any(waiting) or any(running):
            due = [[r for r in queue if arrival_s[r] <= clock] for queue in waiting]
            if not any(due) and not any(running):
                clock = min(arrival_s[queue[0]] for queue in waiting if queue)
                continue
            rows, home, batches, whole = list[int](), list[int](), [], set[int]()
            for rank in range(RANKS):
                mine = [r for r in running[rank] if done[r] == len(self.pieces)]
                rows += [self.row(r, decoded[r] - 1, prompt=False) for r in mine]
                context = sum(settings.prompt_tokens + decoded[r] - 1 for r in mine)
                budget, prompt, cached, prompts = settings.chunk_tokens - len(mine), 0, 0, 0
                candidates = [r for r in running[rank] if done[r] < len(self.pieces)] + due[rank]
                for request in candidates:
                    if request not in running[rank]:
                        if len(running[rank]) == settings.places or len(self.pieces[0]) > budget:
                            break
                        running[rank].append(waiting[rank].popleft())
                    before = done[request]
                    while done[request] < len(self.pieces) and len(self.pieces[done[request]]) <= budget:
                        piece = self.pieces[done[request]]
                        rows += [self.row(request, at, prompt=True) for at in piece]
                        prompt, budget = prompt + len(piece), budget - len(piece)
                        done[request] += 1
                    if done[request] > before:
                        prompts, cached = prompts + 1, cached + before * settings.piece_tokens
                    if done[request] == len(self.pieces):
                        whole.add(request)
                home += [rank] * (len(mine) + prompt)
                batches.append(Batch(len(mine), context, prompt, cached, prompts))
            ids = self.requests.recordings.expert_ids[np.array(rows)]
            part = self.group.mixed_step(ids, np.array(home), batches)
            steps.append(part)
            clock += part.total_s
            for rank in range(RANKS):
                for request in list(running[rank]):
                    if done[request] == len(self.pieces):
                        decoded[request] += 1
                        if request in whole:
                            first[request] = clock
                    if decoded[request] >= self.requests.output_tokens[request]:
                        finish[request] = clock
                        running[rank].remove(request)
        return first, finish, steps


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 2**32 - 1), st.booleans(), st.floats(1e-6, 3e-3), st.booleans(), st.booleans())
def test_equals_a_plain_simulator_on_the_steps_of_a_group(
    seed: int, deduplicate: bool, gap_s: float, linear: bool, graphs: bool
) -> None:
    """Every step costs what Group says for the same tokens, and every request gets its tokens at the same times."""
    rng = np.random.default_rng(seed)
    model = (
        small_model(options=CostOptions(graph_sizes=(1, 2, 4), padding=0.5, overlap=0.2)) if graphs else small_model()
    )
    placement = Placement.linear(LAYERS, 8, RANKS) if linear else shuffled_placement(rng)
    requests = drawn(recordings(rng), 20, rng)
    ranks = np.arange(20) % RANKS if linear else rng.integers(0, RANKS, 20)
    arrival_s = np.cumsum(rng.exponential(gap_s, 20))
    chosen = replace(SETTINGS, deduplicate=deduplicate)
    group = ServingGroup(GroupPrices.of(model, chosen), placement, requests)
    run = group.serve(arrival_s, ranks)
    first, finish, steps = Plain(LockstepGroup(model, placement, deduplicate), requests, chosen).serve(arrival_s, ranks)
    check_served(run, requests, 40)
    assert run.first_s == pytest.approx(first, rel=1e-6)
    assert run.finish_s == pytest.approx(finish, rel=1e-6)
    assert run.steps.remote.tolist() == [step.remote for step in steps]
    assert run.steps.activations.tolist() == [step.activations for step in steps]
    assert run.steps.all_to_all_s == pytest.approx([step.all_to_all_s for step in steps], rel=1e-6, abs=1e-12)
    assert run.steps.experts_s == pytest.approx([step.experts_s for step in steps], rel=1e-6)
    assert run.steps.rest_s == pytest.approx([step.rest_s for step in steps], rel=1e-6)


@settings(max_examples=20, deadline=None)
@given(st.integers(0, 2**32 - 1), st.floats(0.0, 2e-2), st.sampled_from([None, *PASSES]))
def test_whenever_it_ends_nobody_is_lost(seed: int, until_s: float, collectives: Any) -> None:
    rng = np.random.default_rng(seed)
    requests = drawn(recordings(rng), 30, rng)
    group = ServingGroup(
        GroupPrices.of(small_model(), replace(SETTINGS, collectives=collectives)), shuffled_placement(rng), requests
    )
    arrival_s = np.cumsum(rng.exponential(3e-4, 30))
    ranks = None if collectives else rng.integers(0, RANKS, 30)
    cut = group.serve(arrival_s, ranks, until_s)
    check_served(cut, requests, 40)
    whole = group.serve(arrival_s, ranks)
    check_served(whole, requests, 40)
    assert (whole.done, whole.queued, whole.running) == (30, 0, 0)
    ended = np.isfinite(cut.finish_s)
    assert np.array_equal(cut.finish_s[ended], whole.finish_s[ended]), "a run that ends early is a beginning"
    again = group.serve(arrival_s, ranks)
    assert np.array_equal(again.finish_s, whole.finish_s), "the same requests give the same times, to the last bit"


@settings(max_examples=20, deadline=None)
@given(st.integers(0, 2**32 - 1))
def test_requests_go_to_the_least_busy_rank(seed: int) -> None:
    """Prompts that arrive together spread out, affinity decides among idle ranks, and no rank runs far ahead."""
    rng = np.random.default_rng(seed)
    requests = drawn(recordings(rng), 24, rng)
    group = ServingGroup(GroupPrices.of(small_model(), SETTINGS), shuffled_placement(rng), requests)
    together = group.serve(np.zeros(24), affinity=rng.random((6, RANKS)))
    check_served(together, requests, 40)
    assert np.ptp(np.bincount(together.rank, minlength=RANKS)) <= MOST_AHEAD, "equal prompts, equal queues"
    affinity = rng.random((6, RANKS))
    alone = group.serve(np.linspace(0.0, 230.0, 24), affinity=affinity)
    assert alone.rank.tolist() == affinity.argmax(axis=1)[requests.recorded].tolist()
    random = group.serve(np.cumsum(rng.exponential(3e-4, 24)), affinity=affinity)
    check_served(random, requests, 40)
    assert random.done == 24


def served() -> tuple[GroupServedRun, FleetRequests]:
    rng = np.random.default_rng(1)
    requests = drawn(recordings(rng), 12, rng)
    group = ServingGroup(GroupPrices.of(small_model(), SETTINGS), Placement.linear(LAYERS, 8, RANKS), requests)
    return group.serve(np.cumsum(rng.exponential(1e-3, 12)), np.arange(12) % RANKS), requests


def test_a_broken_run_is_caught() -> None:
    run, requests = served()
    for broken in (
        run._replace(queued=1),
        run._replace(decoded=run.decoded - 1),
        run._replace(first_s=run.arrival_s - 1.0),
        run._replace(steps=run.steps._replace(prompt=run.steps.prompt + 1)),
        run._replace(steps=run.steps._replace(decoded=run.steps.decoded + 1)),
        run._replace(steps=run.steps._replace(experts_s=run.steps.experts_s + 1.0)),
    ):
        with pytest.raises(InvariantError):
            check_served(broken, requests, 40)


def test_alone_a_request_takes_the_sum_of_its_steps() -> None:
    """Light load: time to first token is its prompt's steps, the rest one step for each further token."""
    rng = np.random.default_rng(2)
    requests = drawn(recordings(rng), 8, rng, most=9)
    group = ServingGroup(GroupPrices.of(small_model(), SETTINGS), Placement.linear(LAYERS, 8, RANKS), requests)
    run = group.serve(np.linspace(0.0, 70.0, 8), np.arange(8) % RANKS)
    steps, at = run.steps.seconds, 0
    for request, tokens in enumerate(requests.output_tokens):
        prompt = 2  # steps: pieces of 16, 16 and 8 tokens, 24 at most in one
        mine = steps[at : at + prompt + tokens - 1]
        at += len(mine)
        assert run.first_s[request] - run.arrival_s[request] == pytest.approx(mine[:prompt].sum())
        assert run.finish_s[request] - run.arrival_s[request] == pytest.approx(mine.sum())
    assert at == len(steps)
    summary = summarise_served(run)
    assert summary.e2e_p50_ms == pytest.approx(1e3 * np.median(run.finish_s - run.arrival_s))
    assert summary.all_to_all_pct + summary.experts_pct < 100.0


def test_waits_are_those_of_md1() -> None:
    """One rank, prompts of one step, answers of one token: Poisson arrivals wait as in M/D/1."""
    ids = np.tile(np.array([[[0, 4], [1, 5]]], np.uint8), (8, 1, 1))
    records = Recordings(ids, 8, np.zeros(1, np.int64), np.full(1, 4), np.full(1, 4), np.full(1, 4))
    count, rng = 60_000, np.random.default_rng(3)
    requests = FleetRequests(records, np.zeros(count, np.int64), np.full(count, 16), np.ones(count, np.int64))
    one = ServeSettings(prompt_tokens=16, places=1, chunk_tokens=17, piece_tokens=16)
    group = ServingGroup(GroupPrices.of(small_model(), one), Placement.linear(LAYERS, 8, RANKS), requests)
    service = float(group.serve(np.zeros(1), np.zeros(1, np.int64)).finish_s[0])
    for load in (0.3, 0.7):
        arrival_s = np.cumsum(rng.exponential(service / load, count))
        run = group.serve(arrival_s, np.zeros(count, np.int64))
        wait = float((run.finish_s - run.arrival_s).mean()) - service
        assert wait == pytest.approx(service * load / (2 * (1 - load)), rel=0.06)


@pytest.mark.parametrize("deduplicate", [False, True])
def test_nothing_crosses_where_all_is_local(deduplicate: bool) -> None:
    """Requests that ask for the two experts of their rank alone: no exchange, and the step without one."""
    first = np.arange(RANKS) * 4
    ids = np.repeat(np.arange(8, dtype=np.uint8).reshape(RANKS, 1, 2), 4, axis=0).repeat(LAYERS, axis=1)
    records = Recordings(ids, 8, first, np.full(RANKS, 2), first + 2, np.full(RANKS, 2))
    requests = FleetRequests(records, np.arange(16) % RANKS, np.full(16, 40), np.full(16, 5))
    prices = GroupPrices.of(small_model(), replace(SETTINGS, deduplicate=deduplicate))
    group = ServingGroup(prices, Placement.linear(LAYERS, 8, RANKS), requests)
    local = group.serve(np.zeros(16), np.arange(16) % RANKS)
    assert local.steps.all_to_all_s.sum() == 0.0
    assert summarise_served(local).local_rate == 1.0
    away = group.serve(np.zeros(16), (np.arange(16) + 1) % RANKS)
    assert summarise_served(away).local_rate == 0.0
    assert away.end_s > local.end_s


def test_single_copies_cost_no_more() -> None:
    rng = np.random.default_rng(4)
    requests = drawn(recordings(rng), 40, rng)
    ends = []
    for deduplicate in (False, True):
        prices = GroupPrices.of(small_model(), replace(SETTINGS, deduplicate=deduplicate))
        run = ServingGroup(prices, shuffled_placement(np.random.default_rng(0)), requests).serve(
            np.zeros(40), np.arange(40) % RANKS
        )
        ends.append((run.end_s, run.steps.remote.sum()))
    assert ends[1][0] <= ends[0][0]
    assert ends[1][1] == ends[0][1], "activations are remote or not, however they are sent"


@settings(max_examples=50, deadline=None)
@given(st.lists(st.integers(-1, 3), min_size=1, max_size=30))
def test_tokens_are_dealt_in_equal_shares(predicted: list[int]) -> None:
    home = np.empty((1, len(predicted)), np.int64)
    deal_layers(np.array([predicted]), np.arange(len(predicted)), len(predicted), 4, home)
    share = -(-len(predicted) // 4)
    assert np.bincount(home[0], minlength=4).max() <= share
    for rank in range(4):
        wanted = sum(one == rank for one in predicted)
        got = sum(one == rank and at == rank for one, at in zip(predicted, home[0], strict=True))
        assert got == min(wanted, share), "a rank takes those predicted for it while it has room"
    if set(predicted) == {-1}:
        assert home[0].tolist() == [at // share for at in range(len(predicted))], "in order without predictions"


def test_tensor_parallel_steps_by_hand() -> None:
    """One request alone: rest of a rank's part of the model, ring passes, experts and exchange of dealt tokens."""
    rng = np.random.default_rng(5)
    requests, model = drawn(recordings(rng), 1, rng, most=2), small_model()
    for collectives, passes in PASSES.items():
        chosen = ServeSettings(40, 3, 67, 64, collectives=collectives)
        run = ServingGroup(GroupPrices.of(model, chosen), Placement.linear(LAYERS, 8, RANKS), requests).serve(
            np.zeros(1)
        )
        around, rows = ring_time(model.topology), 40
        ring = (passes * LAYERS + 4) * around.us(rows * 64 * 2.0)
        assert run.steps.ring_s[0] == pytest.approx(1e-6 * ring)
        part = replace(model, spec=sharded(SMALL, RANKS))
        tokens = 40 if collectives == "replicated" else 10
        rest = part.attention_s(Batch(prefill_tokens=40)) + part.dense_s(40, 1)
        assert run.steps.rest_s[0] == pytest.approx(rest + LAYERS * 1e-6 * model.routing_us(tokens), rel=1e-6)
        records = requests.recordings
        row = int(records.prompt_row[requests.recorded[0]]) + np.arange(40) % 7
        alone = LockstepGroup(model, Placement.linear(LAYERS, 8, RANKS))
        whole = alone.step(records.expert_ids[row], np.arange(40) // 10, np.zeros(40, np.int64))
        if collectives == "replicated":
            assert run.steps.all_to_all_s[0] == 0.0
        else:
            assert run.steps.all_to_all_s[0] == pytest.approx(whole.all_to_all_s)
            assert run.steps.experts_s[0] == pytest.approx(whole.experts_s, rel=1e-6)
            assert run.steps.remote[0] == whole.remote


def test_knowing_the_experts_makes_tokens_local() -> None:
    """One expert per token, evenly used: predicted ranks that are right leave nothing to cross."""
    spec = replace(SMALL, top_k=1)
    model = step_model(spec, "h200", "bf16", Topology(RANKS))
    ids = np.array([[[(token + layer) % 8] for layer in range(LAYERS)] for token in range(16)], np.uint8)
    records = Recordings(ids, 8, np.zeros(1, np.int64), np.full(1, 8), np.full(1, 8), np.full(1, 8))
    requests = FleetRequests(records, np.zeros(1, np.int64), np.full(1, 32), np.full(1, 4))
    prices = GroupPrices.of(model, ServeSettings(32, 4, 64, 32, collectives="reduce_scatter"))
    placement = Placement.linear(LAYERS, 8, RANKS)
    known = ServingGroup(prices, placement, requests, (ids[:, :, 0] // 2).T.astype(np.int64)).serve(np.zeros(1))
    blind = ServingGroup(prices, placement, requests).serve(np.zeros(1))
    assert summarise_served(known).local_rate == 1.0
    assert known.steps.all_to_all_s.sum() == 0.0
    assert summarise_served(blind).local_rate < 1.0


def test_a_ring_over_a_slower_link_takes_longer() -> None:
    near, far = ring_time(Topology(8, intra=NVLINK4)), ring_time(Topology(8, intra=INFINIBAND_400G))
    across = ring_time(Topology(16, 8, NVLINK4, INFINIBAND_400G))
    assert near.us(1e6) == pytest.approx(7 * (2.0 + 1e6 / 8 / 450e9 * 1e6))
    assert far.us(1e6) > near.us(1e6)
    assert across.byte_us == pytest.approx(15 / 16 / 50e9 * 1e6)


def test_refusals() -> None:
    rng = np.random.default_rng(6)
    requests = drawn(recordings(rng), 4, rng)
    prices, placement = GroupPrices.of(small_model(), SETTINGS), Placement.linear(LAYERS, 8, RANKS)
    with pytest.raises(ConfigError, match="chunk_tokens=18 must be at least places \\+ piece_tokens = 19"):
        ServeSettings(40, 3, 18, 16)
    with pytest.raises(ConfigError, match="without replicas"):
        ServingGroup(prices, Placement.linear(LAYERS, 8, RANKS, 12), requests)
    with pytest.raises(ConfigError, match="all prompts must have prompt_tokens=40"):
        ServingGroup(prices, placement, replace(requests, prompt_tokens=np.full(4, 41)))
    with pytest.raises(ConfigError, match="token_ranks are for attention tensor parallel"):
        ServingGroup(prices, placement, requests, np.zeros((LAYERS, 72), np.int64))
    with pytest.raises(ConfigError, match="one rank for each of 4 requests; it has 3"):
        ServingGroup(prices, placement, requests).serve(np.zeros(4), np.zeros(3, np.int64))
    with pytest.raises(ConfigError, match="affinity has shape"):
        ServingGroup(prices, placement, requests).serve(np.zeros(4), affinity=np.zeros((6, 3)))
    with pytest.raises(ConfigError, match="ranks must be in 0 … 3"):
        ServingGroup(prices, placement, requests).serve(np.zeros(4), np.full(4, 4))
    tensor = GroupPrices.of(small_model(), replace(SETTINGS, collectives="all_reduce"))
    with pytest.raises(ConfigError, match="a request has no rank"):
        ServingGroup(tensor, placement, requests).serve(np.zeros(4), np.zeros(4, np.int64))
    with pytest.raises(ConfigError, match="token_ranks has shape"):
        ServingGroup(tensor, placement, requests, np.zeros((1, 2), np.int64))
    with pytest.raises(ConfigError, match="requests finished; metrics are of whole runs"):
        summarise_served(ServingGroup(prices, placement, requests).serve(np.zeros(4), np.zeros(4, np.int64), 0.0))


# Changes of the placement.


@settings(max_examples=15, deadline=None)
@given(st.integers(0, 2**32 - 1), st.floats(0.0, 1.0), st.floats(0.0, 5e-3))
def test_a_change_to_the_same_placement_only_costs_its_time(seed: int, exposed: float, moved_s: float) -> None:
    rng = np.random.default_rng(seed)
    group, _, ranks = a_group(rng)
    together_s = np.zeros(len(ranks))  # so that no step of either run is idle
    alone = group.serve(together_s, ranks)
    start_s = float(rng.uniform(0, 0.5 * alone.end_s))
    change = Rebalance(group, start_s, range(LAYERS), [moved_s / 2, moved_s], exposed)
    run = group.serve(together_s, ranks, changes=[change])
    check_served(run, group.requests, 40)
    slower_s = run.steps.moves_s.sum() if exposed < 1 else moved_s
    assert run.end_s == pytest.approx(alone.end_s + slower_s, rel=1e-9), "the same steps, as much later"
    assert slower_s <= exposed * moved_s * (1 + 1e-9)
    if run.steps.start_s[-1] > start_s + 2 * moved_s:
        assert slower_s == pytest.approx(exposed * moved_s, rel=1e-9, abs=1e-15)


@settings(max_examples=15, deadline=None)
@given(st.integers(0, 2**32 - 1), st.sampled_from([0.0, 0.3, 1.0]))
def test_a_change_is_a_run_on_one_placement_then_on_the_other(seed: int, exposed: float) -> None:
    """Steps before the change are those of the old placement; with free moves at the start, those of the new one."""
    rng = np.random.default_rng(seed)
    group, arrival_s, ranks = a_group(rng)
    other = ServingGroup(group.prices, shuffled_placement(rng), group.requests)
    old, new = group.serve(arrival_s, ranks), other.serve(arrival_s, ranks)
    half_s = old.end_s / 2
    changes = [Rebalance(other, half_s, range(LAYERS), [1e-4, 2e-4], exposed)]
    run = group.serve(arrival_s, ranks, changes=changes)
    check_served(run, group.requests, 40)
    before = run.steps.start_s < half_s
    assert np.array_equal(run.steps.seconds[before], old.steps.seconds[: before.sum()])
    at_once = group.serve(arrival_s, ranks, changes=[Rebalance(other, 0.0, range(LAYERS), [0.0, 0.0], exposed)])
    assert np.array_equal(at_once.finish_s, new.finish_s)
    assert np.array_equal(at_once.steps.remote, new.steps.remote)
    cut = group.serve(arrival_s, ranks, half_s, changes=changes)
    assert cut.end_s <= half_s + old.steps.seconds.max(), "a run that ends before a change has none"
    assert np.array_equal(cut.finish_s, group.serve(arrival_s, ranks, half_s).finish_s, equal_nan=True)
    back = [*changes, Rebalance(group, 0.0, range(LAYERS), [0.0, 0.0], exposed)]
    assert np.isfinite(group.serve(arrival_s, ranks, changes=back).finish_s).all()
    assert np.array_equal(group.serve(arrival_s, ranks).finish_s, old.finish_s), "tables of the group are untouched"


def a_group(rng: np.random.Generator) -> tuple[ServingGroup, NDArray[np.float64], NDArray[np.int64]]:
    requests = drawn(recordings(rng), 30, rng)
    group = ServingGroup(GroupPrices.of(small_model(), SETTINGS), shuffled_placement(rng), requests)
    return group, np.cumsum(rng.exponential(3e-4, 30)), rng.integers(0, RANKS, 30)
