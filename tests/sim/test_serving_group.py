from __future__ import annotations

from collections import deque
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from coterie.answers.plan.moving import Once
from coterie.costs.exchange import ring_time
from coterie.costs.presets import step_model
from coterie.costs.step import Batch, CostOptions, StepModel
from coterie.errors import ConfigError
from coterie.routing import Decision, Fleet, Request
from coterie.routing.baselines import JoinShortestQueue
from coterie.sim.fleet.requests import FinishedRequest, FleetRequests, Recordings
from coterie.sim.group import LockstepGroup
from coterie.sim.group._serve import deal_layers
from coterie.sim.group.serving import (
    PASSES,
    GroupLoads,
    GroupPrices,
    GroupServedRun,
    Rebalance,
    ServeSettings,
    ServingGroup,
    sharded,
)
from coterie.types import INFINIBAND_400G, NVLINK4, ModelSpec, Placement, Topology
from sim_checks import InvariantError, check_served

SMALL = ModelSpec("small", 3, 8, 2, 64, 32, 4, 2, 16, 1000, first_moe_layer=1)
RANKS, LAYERS = 4, 2
SETTINGS = ServeSettings(places=3, chunk_tokens=24, piece_tokens=16)


def small_model(**changes: Any) -> StepModel:
    return step_model(SMALL, "h200", "bf16", Topology(RANKS), **changes)


def recordings(rng: np.random.Generator, count: int = 6, rows: int = 12) -> Recordings:
    ids = np.array([[rng.permutation(8)[:2] for _ in range(LAYERS)] for _ in range(count * rows)], np.uint8)
    first = np.arange(count) * rows
    return Recordings(ids, 8, first, np.full(count, 7), first + 7, np.full(count, rows - 7))


def drawn(
    records: Recordings, count: int, rng: np.random.Generator, prompts: tuple[int, int] = (1, 50), most: int = 6
) -> FleetRequests:
    lengths, outputs = rng.integers(*prompts, count), rng.integers(1, most, count)
    return FleetRequests(records, rng.integers(0, len(records), count), lengths, outputs)


def shuffled_placement(rng: np.random.Generator, spare: int = 0) -> Placement:
    """Every expert somewhere, and `spare` slots on each rank with any expert."""
    slots = [rng.permutation(np.r_[np.arange(8), rng.integers(0, 8, spare * RANKS)]) for _ in range(LAYERS)]
    return Placement(np.array(slots, np.int32), RANKS, 8)


class Plain:
    """The same group, request by request in plain Python, timed by Group.mixed_step."""

    def __init__(self, group: LockstepGroup, requests: FleetRequests, settings: ServeSettings) -> None:
        self.group, self.requests, self.settings = group, requests, settings
        self.pieces: list[list[range]] = []
        for tokens in requests.prompt_tokens.tolist():
            cuts = range(0, tokens, settings.piece_tokens)
            self.pieces.append([range(at, min(at + settings.piece_tokens, tokens)) for at in cuts])

    def row(self, request: int, at: int, prompt: bool) -> int:
        records, recorded = self.requests.recordings, int(self.requests.recorded[request])
        first, length = (
            (records.prompt_row, records.prompt_rows) if prompt else (records.decode_row, records.decode_rows)
        )
        return int(first[recorded]) + at % int(length[recorded])

    def tokens(self, request: int) -> int:
        return int(self.requests.prompt_tokens[request] + self.requests.output_tokens[request])

    def serve(self, arrival_s: NDArray[np.float64], ranks: NDArray[np.int64], kv: int = 1 << 30) -> Any:
        count, clock, settings = len(arrival_s), 0.0, self.settings
        served = [[r for r in range(count) if ranks[r] == rank and self.tokens(r) <= kv] for rank in range(RANKS)]
        waiting = [deque(queue) for queue in served]
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
                mine = [r for r in running[rank] if done[r] == len(self.pieces[r])]
                rows += [self.row(r, decoded[r] - 1, prompt=False) for r in mine]
                context = sum(int(self.requests.prompt_tokens[r]) + decoded[r] - 1 for r in mine)
                budget, prompt, cached, prompts = settings.chunk_tokens - len(mine), 0, 0, 0
                candidates = [r for r in running[rank] if done[r] < len(self.pieces[r])] + due[rank]
                for request in candidates:
                    if request not in running[rank]:
                        if len(running[rank]) == settings.places or len(self.pieces[request][0]) > budget:
                            break
                        if sum(self.tokens(r) for r in [*running[rank], request]) > kv:
                            break
                        running[rank].append(waiting[rank].popleft())
                    before = done[request]
                    while (
                        done[request] < len(self.pieces[request]) and len(self.pieces[request][done[request]]) <= budget
                    ):
                        piece = self.pieces[request][done[request]]
                        rows += [self.row(request, at, prompt=True) for at in piece]
                        prompt, budget = prompt + len(piece), budget - len(piece)
                        done[request] += 1
                    if done[request] > before:
                        prompts, cached = prompts + 1, cached + before * settings.piece_tokens
                    if done[request] == len(self.pieces[request]):
                        whole.add(request)
                home += [rank] * (len(mine) + prompt)
                batches.append(Batch(len(mine), context, prompt, cached, prompts))
            ids = self.requests.recordings.expert_ids[np.array(rows)]
            part = self.group.mixed_step(ids, np.array(home), batches)
            steps.append(part)
            clock += part.total_s
            for rank in range(RANKS):
                for request in list(running[rank]):
                    if done[request] == len(self.pieces[request]):
                        decoded[request] += 1
                        if request in whole:
                            first[request] = clock
                    if decoded[request] >= self.requests.output_tokens[request]:
                        finish[request] = clock
                        running[rank].remove(request)
        return first, finish, steps


@settings(max_examples=40, deadline=None)
@given(
    st.integers(0, 2**32 - 1),
    st.booleans(),
    st.floats(1e-6, 3e-3),
    st.booleans(),
    st.integers(0, 2),
    st.sampled_from([1, 2]),
    st.sampled_from([None, 90, 48]),
)
def test_equals_a_plain_simulator_on_the_steps_of_a_group(
    seed: int, deduplicate: bool, gap_s: float, graphs: bool, spare: int, nodes: int, kv_tokens: int | None
) -> None:
    """Every step costs what Group says for the same tokens, and every request gets its tokens at the same times."""
    rng = np.random.default_rng(seed)
    options = CostOptions(graph_sizes=(1, 2, 4), padding=0.5, overlap=0.2) if graphs else CostOptions()
    model = replace(small_model(options=options), topology=Topology(RANKS, RANKS // nodes))
    placement, requests, ranks = shuffled_placement(rng, spare), drawn(recordings(rng), 20, rng), rng.integers(0, 4, 20)
    arrival_s = np.cumsum(rng.exponential(gap_s, 20))
    chosen = replace(SETTINGS, deduplicate=deduplicate, kv_tokens=kv_tokens)
    group = ServingGroup(GroupPrices.of(model, chosen), placement, requests)
    run = group.serve(arrival_s, ranks=ranks)
    plain = Plain(LockstepGroup(model, placement, deduplicate), requests, chosen)
    first, finish, steps = plain.serve(arrival_s, ranks, kv_tokens or 1 << 30)
    check_served(run, requests, kv_tokens)
    large = requests.prompt_tokens + requests.output_tokens > (kv_tokens or 1 << 30)
    assert run.dropped.tolist() == large.tolist(), "only what never fits is dropped"
    assert run.first_s == pytest.approx(first, rel=1e-6, nan_ok=True)
    assert run.finish_s == pytest.approx(finish, rel=1e-6, nan_ok=True)
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
    cut = group.serve(arrival_s, ranks=ranks, until_s=until_s)
    check_served(cut, requests)
    whole = group.serve(arrival_s, ranks=ranks)
    check_served(whole, requests)
    assert (whole.done, whole.queued, whole.running) == (30, 0, 0)
    ended = np.isfinite(cut.finish_s)
    assert np.array_equal(cut.finish_s[ended], whole.finish_s[ended]), "a run that ends early is a beginning"
    again = group.serve(arrival_s, ranks=ranks)
    assert np.array_equal(again.finish_s, whole.finish_s), "the same requests give the same times, to the last bit"


@settings(max_examples=20, deadline=None)
@given(st.integers(0, 2**32 - 1), st.sampled_from([None, 120]))
def test_a_router_sees_the_fleet_as_it_is(seed: int, kv_tokens: int | None) -> None:
    """At each arrival: the requests, prompt tokens to compute and KV memory of every rank."""
    rng = np.random.default_rng(seed)
    requests = drawn(recordings(rng), 24, rng)
    seen: list[tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.float64]]] = []

    class Seeing:
        def route(self, request: Request, fleet: Fleet) -> Decision:
            seen.append((fleet.in_flight.copy(), fleet.prefill_tokens.copy(), fleet.kv_used.copy()))
            assert request.prompt_tokens == requests.prompt_tokens[int(request.id)]
            return JoinShortestQueue().route(request, fleet)

    prices = GroupPrices.of(small_model(), replace(SETTINGS, kv_tokens=kv_tokens))
    group = ServingGroup(
        prices, shuffled_placement(rng), replace(requests, arrival_s=np.cumsum(rng.exponential(3e-4, 24)))
    )
    run = group.serve(router=Seeing())
    check_served(run, requests, kv_tokens)
    assert np.array_equal(group.serve().finish_s, run.finish_s), "the default is the shortest queue"
    assert len(seen) == 24
    for request, (in_flight, waiting, kv_used) in enumerate(seen):
        starts = run.steps.start_s
        at_s = starts[starts >= run.arrival_s[request]][0]  # decided before the first step after the arrival
        there = (np.arange(24) < request) & (run.finish_s > at_s)
        assert in_flight.tolist() == np.bincount(run.rank[there], minlength=RANKS).tolist()
        assert in_flight[run.rank[request]] == in_flight.min()
        untouched = run.rank[there & (run.first_s > at_s)]
        assert (waiting[np.setdiff1d(np.arange(RANKS), untouched)] == 0).all()
        assert kv_used.max() <= 1 if kv_tokens else not kv_used.any()


def served() -> tuple[GroupServedRun, FleetRequests]:
    rng = np.random.default_rng(1)
    requests = drawn(recordings(rng), 12, rng)
    group = ServingGroup(GroupPrices.of(small_model(), SETTINGS), Placement.linear(LAYERS, 8, RANKS), requests)
    return group.serve(np.cumsum(rng.exponential(1e-3, 12)), ranks=np.arange(12) % RANKS), requests


def test_a_broken_run_is_caught() -> None:
    run, requests = served()
    for broken in (
        run._replace(queued=1),
        run._replace(dropped=~run.dropped),
        run._replace(kv_held=run.kv_held + 1),
        run._replace(decoded=run.decoded - 1),
        run._replace(first_s=run.arrival_s - 1.0),
        run._replace(steps=run.steps._replace(prompt=run.steps.prompt + 1)),
        run._replace(steps=run.steps._replace(decoded=run.steps.decoded + 1)),
        run._replace(steps=run.steps._replace(experts_s=run.steps.experts_s + 1.0)),
    ):
        with pytest.raises(InvariantError):
            check_served(broken, requests)


def test_alone_a_request_takes_the_sum_of_its_steps() -> None:
    """Light load: time to first token is its prompt's steps, the rest one step for each further token."""
    rng = np.random.default_rng(2)
    requests = drawn(recordings(rng), 8, rng, (40, 41), most=9)
    group = ServingGroup(GroupPrices.of(small_model(), SETTINGS), Placement.linear(LAYERS, 8, RANKS), requests)
    run = group.serve(np.linspace(0.0, 70.0, 8), ranks=np.arange(8) % RANKS)
    steps, at = run.steps.seconds, 0
    for request, tokens in enumerate(requests.output_tokens):
        prompt = 2  # steps: pieces of 16, 16 and 8 tokens, 24 at most in one
        mine = steps[at : at + prompt + tokens - 1]
        at += len(mine)
        assert run.first_s[request] - run.arrival_s[request] == pytest.approx(mine[:prompt].sum())
        assert run.finish_s[request] - run.arrival_s[request] == pytest.approx(mine.sum())
    assert at == len(steps)


def test_waits_are_those_of_md1() -> None:
    """One rank, prompts of one step, answers of one token: Poisson arrivals wait as in M/D/1."""
    ids = np.tile(np.array([[[0, 4], [1, 5]]], np.uint8), (8, 1, 1))
    records = Recordings(ids, 8, np.zeros(1, np.int64), np.full(1, 4), np.full(1, 4), np.full(1, 4))
    count, rng = 60_000, np.random.default_rng(3)
    requests = FleetRequests(records, np.zeros(count, np.int64), np.full(count, 16), np.ones(count, np.int64))
    one = ServeSettings(places=1, chunk_tokens=17, piece_tokens=16)
    group = ServingGroup(GroupPrices.of(small_model(), one), Placement.linear(LAYERS, 8, RANKS), requests)
    service = float(group.serve(np.zeros(1), ranks=np.zeros(1, np.int64)).finish_s[0])
    for load in (0.3, 0.7):
        arrival_s = np.cumsum(rng.exponential(service / load, count))
        run = group.serve(arrival_s, ranks=np.zeros(count, np.int64))
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
    local = group.serve(np.zeros(16), ranks=np.arange(16) % RANKS)
    assert local.steps.all_to_all_s.sum() == 0.0
    assert not local.steps.remote.any()
    away = group.serve(np.zeros(16), ranks=(np.arange(16) + 1) % RANKS)
    assert (away.steps.remote == away.steps.activations).all()
    assert away.end_s > local.end_s


def test_single_copies_cost_no_more() -> None:
    rng = np.random.default_rng(4)
    requests = drawn(recordings(rng), 40, rng)
    ends = []
    for deduplicate in (False, True):
        prices = GroupPrices.of(small_model(), replace(SETTINGS, deduplicate=deduplicate))
        group = ServingGroup(prices, shuffled_placement(np.random.default_rng(0)), requests)
        run = group.serve(np.zeros(40), ranks=np.arange(40) % RANKS)
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
    requests, model = drawn(recordings(rng), 1, rng, (40, 41), most=2), small_model()
    for collectives, passes in PASSES.items():
        chosen = ServeSettings(3, 67, 64, collectives=collectives)
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
    prices = GroupPrices.of(model, ServeSettings(4, 64, 32, collectives="reduce_scatter"))
    placement = Placement.linear(LAYERS, 8, RANKS)
    known = ServingGroup(prices, placement, requests, (ids[:, :, 0] // 2).T.astype(np.int64)).serve(np.zeros(1))
    blind = ServingGroup(prices, placement, requests).serve(np.zeros(1))
    assert not known.steps.remote.any()
    assert known.steps.all_to_all_s.sum() == 0.0
    assert blind.steps.remote.any()


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
        ServeSettings(3, 18, 16)
    with pytest.raises(ConfigError, match="one slot per expert"):
        ServingGroup(prices, Placement.linear(LAYERS, 8, RANKS, 12), requests).serve(np.zeros(4), even=True)
    with pytest.raises(ConfigError, match="4 workers without requests"):
        ServingGroup(prices, placement, requests).serve(np.zeros(4), fleet=Fleet([3]))
    with pytest.raises(ConfigError, match="there are no requests"):
        ServingGroup(prices, placement, requests).serve()
    with pytest.raises(ConfigError, match="token_ranks are for attention tensor parallel"):
        ServingGroup(prices, placement, requests, np.zeros((LAYERS, 72), np.int64))
    with pytest.raises(ConfigError, match="one rank for each of 4 requests; it has 3"):
        ServingGroup(prices, placement, requests).serve(np.zeros(4), ranks=np.zeros(3, np.int64))
    with pytest.raises(ConfigError, match="ranks must be in 0 … 3"):
        ServingGroup(prices, placement, requests).serve(np.zeros(4), ranks=np.full(4, 4))
    tensor = GroupPrices.of(small_model(), replace(SETTINGS, collectives="all_reduce"))
    with pytest.raises(ConfigError, match="a request has no rank"):
        ServingGroup(tensor, placement, requests).serve(np.zeros(4), ranks=np.zeros(4, np.int64))
    with pytest.raises(ConfigError, match="token_ranks has shape"):
        ServingGroup(tensor, placement, requests, np.zeros((1, 2), np.int64))


# Changes of the placement.


NOW = 1e-12
"""Time of a controller's first tick: before the first step."""


@settings(max_examples=15, deadline=None)
@given(st.integers(0, 2**32 - 1), st.floats(0.0, 1.0), st.floats(0.0, 5e-3), st.integers(0, 1))
def test_a_change_to_the_same_placement_only_costs_its_time(
    seed: int, exposed: float, moved_s: float, spare: int
) -> None:
    rng = np.random.default_rng(seed)
    group, _, ranks = a_group(rng, spare)
    together_s = np.zeros(len(ranks))  # so that no step of either run is idle
    alone = group.serve(together_s, ranks=ranks)
    start_s = float(rng.uniform(0, 0.5 * alone.end_s))
    change = Rebalance(group.placement, range(LAYERS), [moved_s / 2, moved_s], exposed)
    run = group.serve(together_s, ranks=ranks, controller=Once(change, start_s))
    check_served(run, group.requests)
    slower_s = run.steps.moves_s.sum() if exposed < 1 else moved_s
    assert run.end_s == pytest.approx(alone.end_s + slower_s, rel=1e-9), "the same steps, as much later"
    assert slower_s <= exposed * moved_s * (1 + 1e-9)
    if run.steps.start_s[-1] > start_s + 2 * moved_s:
        assert slower_s == pytest.approx(exposed * moved_s, rel=1e-9, abs=1e-15)


@settings(max_examples=15, deadline=None)
@given(st.integers(0, 2**32 - 1), st.sampled_from([0.0, 0.3, 1.0]), st.integers(0, 2), st.integers(0, 2))
def test_a_change_is_a_run_on_one_placement_then_on_the_other(seed: int, exposed: float, spare: int, new: int) -> None:
    """Steps before the change are those of the old placement; with free moves at the start, those of the new one."""
    rng = np.random.default_rng(seed)
    group, arrival_s, ranks = a_group(rng, spare)
    other = ServingGroup(group.prices, shuffled_placement(rng, new), group.requests)
    old, after = group.serve(arrival_s, ranks=ranks), other.serve(arrival_s, ranks=ranks)
    half_s = old.end_s / 2
    change = Rebalance(other.placement, range(LAYERS), [1e-4, 2e-4], exposed, 5.0, "why")
    run = group.serve(arrival_s, ranks=ranks, controller=Once(change, half_s))
    check_served(run, group.requests)
    before = run.steps.start_s < half_s
    assert np.array_equal(run.steps.seconds[before], old.steps.seconds[: before.sum()])
    assert not run.steps.in_use[before].any()
    for landed in run.changes:
        assert half_s <= landed.asked_s == landed.start_s <= landed.end_s - 2e-4 + 1e-12
        assert landed[3:] == (5.0, LAYERS, "why")
        assert (run.steps.in_use == (run.steps.start_s >= landed.end_s)).all()
    free = Once(change._replace(moved_s=[0.0, 0.0]), NOW)
    at_once = group.serve(arrival_s, ranks=ranks, controller=free)
    assert at_once.finish_s == pytest.approx(after.finish_s, rel=1e-9)
    assert np.array_equal(at_once.steps.remote, after.steps.remote)
    cut = group.serve(arrival_s, ranks=ranks, until_s=half_s, controller=Once(change, half_s))
    assert cut.end_s <= half_s + old.steps.seconds.max(), "a run that ends before a change has none"
    assert np.array_equal(cut.finish_s, group.serve(arrival_s, ranks=ranks, until_s=half_s).finish_s, equal_nan=True)
    assert np.array_equal(group.serve(arrival_s, ranks=ranks).finish_s, old.finish_s), "the group is untouched"


class Swinging:
    """Changes to random placements all the time, and adds up what it sees."""

    def __init__(self, rng: np.random.Generator, exposed: float, late_s: float, layers: int = LAYERS) -> None:
        self.rng, self.exposed, self.every_s, self.late_s = rng, exposed, 1e-3, late_s
        self.layers, self.moving, self.placements = range(layers), False, list[Placement]()
        self.sources, self.steps, self.ended = np.zeros((RANKS, LAYERS, 8)), 0, list[FinishedRequest]()
        self.ticks_s: list[float] = []

    def tick(self, now_s: float, loads: GroupLoads) -> Rebalance | None:
        self.ticks_s.append(now_s)
        self.sources += loads.sources
        self.steps += loads.steps
        self.ended += loads.ended
        assert all(request.at_s <= now_s - self.late_s + 1e-9 for request in loads.ended)
        if self.moving or self.rng.random() < 0.5:
            return None
        self.moving = True
        self.placements.append(shuffled_placement(self.rng, int(self.rng.integers(0, 3))))
        moved_s = np.sort(self.rng.uniform(0, 2e-3, LAYERS)).tolist()
        return Rebalance(self.placements[-1], self.rng.permutation(self.layers).tolist(), moved_s, self.exposed)

    def landed(self, _now_s: float, placement: Placement) -> None:
        assert placement is self.placements[-1]
        self.moving = False


@settings(max_examples=25, deadline=None)
@given(
    st.integers(0, 2**32 - 1),
    st.sampled_from([0.0, 0.4, 1.0]),
    st.sampled_from([0.0, 4e-4, 3.5e-3]),
    st.booleans(),
    st.sampled_from([np.inf, 8e-3]),
)
def test_whatever_changes_nobody_is_lost(seed: int, exposed: float, late_s: float, nodes: bool, until_s: float) -> None:
    """Random changes of placement and slots, KV memory that follows the slots, statistics that arrive late."""
    rng = np.random.default_rng(seed)
    requests, memory = drawn(recordings(rng), 40, rng), {2: 160, 3: 120, 4: 60}
    model = replace(small_model(), topology=Topology(RANKS, RANKS // (1 + nodes)))
    prices = GroupPrices.of(model, replace(SETTINGS, kv_tokens=memory.__getitem__))
    group = ServingGroup(prices, shuffled_placement(rng), requests)
    arrival_s, swinging = np.cumsum(rng.exponential(4e-4, 40)), Swinging(rng, exposed, late_s)
    run = group.serve(arrival_s, controller=swinging, until_s=until_s)
    check_served(run, requests, 160)
    assert not run.dropped.any()
    assert run.done == 40 or until_s < np.inf
    assert len(swinging.placements) - swinging.moving == len(run.changes) == run.steps.in_use.max(initial=0) or (
        run.changes and run.changes[-1].end_s > run.steps.start_s[-1]
    )
    assert (np.diff(swinging.ticks_s) > 0).all()
    seen = run.steps.start_s < swinging.ticks_s[-1] - late_s if swinging.ticks_s else np.zeros(0, bool)
    assert swinging.steps == seen.sum(), "each step is seen once, when it is old enough"
    assert swinging.sources.sum() == run.steps.activations[seen].sum()
    ids = [request.request for request in swinging.ended]
    assert len(set(ids)) == len(ids)
    assert all(run.rank[request.request] == request.worker for request in swinging.ended)
    for at, landed in enumerate(run.changes):
        assert landed.asked_s <= landed.start_s <= landed.end_s
        if at:
            assert run.changes[at - 1].end_s <= landed.asked_s, "one change at a time"


def test_weights_wait_for_the_memory_that_they_need() -> None:
    """Two long requests hold the memory of a rank: the change starts when one has ended, and nothing is admitted."""
    rng = np.random.default_rng(3)
    requests = drawn(recordings(rng), 3, rng, (40, 41), most=2)
    requests = replace(requests, output_tokens=np.array([20, 30, 5]))
    prices = GroupPrices.of(small_model(), replace(SETTINGS, kv_tokens={2: 140, 3: 70}.__getitem__))
    change = Rebalance(shuffled_placement(rng, 1), range(LAYERS), [1e-4, 2e-4], 0.2)
    group = ServingGroup(prices, shuffled_placement(rng), requests)
    run = group.serve(np.full(3, 1e-6), ranks=np.zeros(3, np.int64), controller=Once(change, NOW))
    (landed,) = run.changes
    assert run.kv_most[0] <= 70, "the memory is promised to the new slots"
    assert landed.start_s == NOW
    both_s = float(group.serve(np.zeros(3), ranks=np.zeros(3, np.int64)).first_s[1])
    late = group.serve(np.zeros(3), ranks=np.zeros(3, np.int64), controller=Once(change, both_s))
    assert late.kv_most[0] == 130
    (landed,) = late.changes
    assert (landed.asked_s, landed.start_s) == (both_s, late.finish_s[0]), "70 tokens are left"
    assert late.first_s[2] > late.finish_s[1], "45 more do not fit"


def test_an_even_split_bounds_every_placement() -> None:
    """The same steps: experts take no less time on any placement, and equal time if the load is even anyway."""
    rng = np.random.default_rng(7)
    requests = drawn(recordings(rng), 30, rng)
    prices, ranks = GroupPrices.of(small_model(), SETTINGS), rng.integers(0, RANKS, 30)
    group = ServingGroup(prices, shuffled_placement(rng), requests)
    bound = group.serve(np.zeros(30), ranks=ranks, even=True)
    check_served(bound, requests)
    for _ in range(5):
        run = ServingGroup(prices, shuffled_placement(rng), requests).serve(np.zeros(30), ranks=ranks)
        assert np.array_equal(run.steps.prompt, bound.steps.prompt), "without arrivals, time changes no step"
        assert (bound.steps.experts_s <= run.steps.experts_s * (1 + 1e-9)).all()
    assert (bound.steps.balancedness == 1).all()
    ids = np.tile(np.arange(8, dtype=np.uint8).reshape(4, 1, 2), (3, LAYERS, 1))  # each rank's experts alike
    records = Recordings(ids, 8, np.zeros(1, np.int64), np.full(1, 4), np.full(1, 4), np.full(1, 4))
    same = FleetRequests(records, np.zeros(4, np.int64), np.full(4, 16), np.ones(4, np.int64))
    group = ServingGroup(prices, Placement.linear(LAYERS, 8, RANKS), same)
    runs = [group.serve(np.zeros(4), ranks=np.arange(4), even=even) for even in (False, True)]
    assert runs[0].steps.experts_s == pytest.approx(runs[1].steps.experts_s)


def test_a_change_that_cannot_be_made_is_refused() -> None:
    rng = np.random.default_rng(8)
    group, arrival_s, _ = a_group(rng)
    for wrong, words in (
        (Rebalance(shuffled_placement(rng), [0], [0.0], 1.0), "does not move"),
        (Rebalance(shuffled_placement(rng), [0, 1], [1.0, 0.0], 1.0), "must not fall"),
        (Rebalance(Placement.linear(LAYERS, 8, 2), [0, 1], [0.0, 0.0], 1.0), "num_ranks"),
    ):
        with pytest.raises(ConfigError, match=words):
            group.serve(arrival_s, controller=Once(wrong, NOW))


def a_group(rng: np.random.Generator, spare: int = 0) -> tuple[ServingGroup, NDArray[np.float64], NDArray[np.int64]]:
    requests = drawn(recordings(rng), 30, rng)
    group = ServingGroup(GroupPrices.of(small_model(), SETTINGS), shuffled_placement(rng, spare), requests)
    return group, np.cumsum(rng.exponential(3e-4, 30)), rng.integers(0, RANKS, 30)
