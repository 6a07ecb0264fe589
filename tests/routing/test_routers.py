from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from coterie.costs.lines import DecodeStepPrices
from coterie.costs.presets import step_model
from coterie.costs.step import Batch, PlacedStepModel, in_order
from coterie.errors import ConfigError, UnknownNameError
from coterie.models import get_model
from coterie.routing import Fleet, Request, Router, routers
from coterie.routing.baselines import Domain, share_out
from coterie.routing.joint import Joint
from coterie.routing.latency_aware import LatencyAware
from coterie.routing.locality_band import LocalityBand
from coterie.testing import check_router
from coterie.types import Placement, Topology
from routing_cases import COST, EXPERTS, LAYERS, TOP_K, WORKERS, draw, fitted

INDICES = LAYERS * EXPERTS
PLACEMENT = Placement.linear(LAYERS, EXPERTS, WORKERS, 2 * WORKERS)


def make(name: str) -> Callable[[], Router]:
    context = {"fitted": fitted(), "cost": COST, "labels": {"code": (1, 2)}, "placement": PLACEMENT}
    return lambda: routers.make(name, context)


def latency_aware(cost: DecodeStepPrices = COST) -> LatencyAware:
    return LatencyAware(fitted(), cost)


def test_all_that_the_package_promises_are_there() -> None:
    assert set(routers) >= {
        "random",
        "round_robin",
        "join_shortest_queue",
        "power_of_two",
        "domain",
        "pressure",
        "locality_band",
        "joint",
        "latency_aware",
        "semantic",
    }
    with pytest.raises(UnknownNameError, match="locality_band"):
        routers["locality_bend"]


@pytest.mark.parametrize("name", sorted(routers))
def test_contract(name: str) -> None:
    check_router(make(name), LAYERS, EXPERTS, WORKERS)


def busy(loads: list[int]) -> Fleet:
    fleet = Fleet([64] * len(loads), np.full((len(loads), INDICES), 0.25, np.float32))
    for worker, load in enumerate(loads):
        for number in range(load):
            fleet.admit(f"{worker}-{number}", worker)
    return fleet


def serve(router: Router, fleet: Fleet, requests: list[Request]) -> list[int]:
    chosen = []
    for request in requests:
        decision = router.route(request, fleet)
        fleet.admit(request.id, decision.worker, request.prompt_tokens, decision.profile)
        chosen.append(decision.worker)
    return chosen


def test_round_robin_goes_round_and_passes_the_dead() -> None:
    fleet = Fleet([9] * 3)
    named = [Request(str(number)) for number in range(6)]
    assert serve(routers.make("round_robin"), fleet, named) == [0, 1, 2, 0, 1, 2]
    fleet.alive[1] = False
    assert serve(routers.make("round_robin"), fleet, [Request(f"x{n}") for n in range(6)]) == [0, 2, 0, 2, 0, 2]


@pytest.mark.parametrize("name", ["round_robin", "join_shortest_queue", "joint", "locality_band", "pressure"])
def test_a_dead_worker_s_turns_are_shared(name: str) -> None:
    """Its neighbour got them all: seven of eight requests, in a fleet of eight of which two live and none is busy."""
    router, counts = make(name)(), [0] * WORKERS
    fleet = Fleet([9] * WORKERS, np.full((WORKERS, INDICES), 0.25, np.float32))
    fleet.alive[:] = [False, True, False, False, True, False]
    for number in range(20):
        (worker,) = serve(router, fleet, [Request(str(number))])
        fleet.finish(str(number))
        counts[worker] += 1
    assert counts == [0, 10, 0, 0, 10, 0]


def test_shortest_queue_by_speed() -> None:
    fleet = busy([3, 4, 3])
    fleet.speeds[:] = [1.0, 2.0, 1.0]
    assert routers.make("join_shortest_queue").route(Request(), fleet).worker == 1


@given(st.lists(st.integers(0, 9), min_size=2, max_size=12), st.integers(0, 999))
def test_power_of_two_takes_the_shorter_of_two(loads: list[int], seed: int) -> None:
    fleet = busy(loads)
    decision = routers.make("power_of_two", {"seed": seed}).route(Request(), fleet)
    pair = np.flatnonzero(np.isfinite(decision.scores))
    assert len(pair) == 2
    assert fleet.running[decision.worker] == fleet.running[pair].min()


def test_random_is_even_and_follows_its_seed() -> None:
    fleet, counts = Fleet([10_000] * 5), np.zeros(5)
    for worker in serve(routers.make("random", {"seed": 3}), fleet, [Request(str(n)) for n in range(5000)]):
        counts[worker] += 1
    assert (np.abs(counts - 1000) < 4 * np.sqrt(800)).all()
    first = [routers.make("random", {"seed": s}).route(Request(), fleet).worker for s in range(20)]
    assert len(set(first)) > 1


@given(st.lists(st.integers(0, 9), min_size=WORKERS, max_size=WORKERS), st.integers(0, 999))
def test_a_band_of_none_is_the_most_alike_and_of_all_the_shortest_queue(loads: list[int], seed: int) -> None:
    fleet, known = busy(loads), fitted()
    request = Request("r", 10, draw(1, seed).prefill[0])
    assert request.footprint is not None
    similarity = known.similarities(request.footprint)
    assert similarity[LocalityBand(known, 0.0).route(request, fleet).worker] == similarity.max()
    everyone = LocalityBand(known, 1.0).route(request, fleet).worker
    assert everyone == routers.make("join_shortest_queue").route(request, fleet).worker
    inside = np.flatnonzero(similarity >= similarity.max() - 0.1)
    assert fleet.running[LocalityBand(known).route(request, fleet).worker] == fleet.running[inside].min()


def test_the_band_refuses_another_fleet_and_being_unfitted() -> None:
    request = Request("r", 10, draw(1, 0).prefill[0])
    with pytest.raises(ConfigError, match="6 workers"):
        LocalityBand(fitted()).route(request, Fleet([4] * 5))
    with pytest.raises(ConfigError, match="'locality_band' needs fitted"):
        routers.make("locality_band")
    with pytest.raises(ConfigError, match="band"):
        LocalityBand(fitted(), 1.5)


def expected_distinct(residents: list[np.ndarray]) -> float:
    return float((1 - np.prod([1 - p for p in residents], axis=0)).sum()) if residents else 0.0


def test_latency_aware_gathers_the_alike() -> None:
    """Requests of four groups on six workers: fewer experts a step than the shortest queue, loads within reason."""
    drawn = draw(48, 5)
    named = [Request(str(n), 0, drawn.prefill[n]) for n in range(48)]
    distinct = {}
    for name in ("latency_aware", "join_shortest_queue"):
        fleet = fitted().fleet(64)
        chosen = np.array(serve(make(name)(), fleet, named))
        true = drawn.decode.reshape(48, -1) / (drawn.decode.sum(axis=2).mean() / TOP_K)
        distinct[name] = sum(expected_distinct(list(true[chosen == worker])) for worker in range(WORKERS))
        assert fleet.running.max() <= 16
    assert distinct["latency_aware"] < 0.9 * distinct["join_shortest_queue"]


def test_latency_aware_scores_are_its_formula() -> None:
    """In double precision from the footprint on; `missed` alone is rounded, as the fleet keeps it."""
    rng, known, prices = np.random.default_rng(0), fitted(), COST
    drawn, forecast = draw(40, 6), known.learned.forecast.map
    fleet = known.fleet(64, rng.uniform(0.5, 2.0, WORKERS))
    for number in range(30):
        one = known.profile(drawn.prefill[number])
        fleet.admit(str(number), int(rng.integers(WORKERS)), int(rng.integers(2000)), one)
    fleet.prefill_tokens[:] = rng.integers(0, 5000, WORKERS)
    before, after, inward, outward = (
        np.asarray(one, np.float64) for one in (forecast.before, forecast.after, forecast.inward, forecast.outward)
    )
    for number in range(30, 40):
        counts, cached = drawn.prefill[number], rng.integers(0, 900, WORKERS)
        tokens = counts.sum() / (LAYERS * TOP_K)
        z = tokens / (tokens + forecast.noise) * (counts.reshape(-1) / tokens - before)
        profile = np.clip(after + forecast.own * z + (inward @ z) @ outward, 0, 1)
        added = (fleet.missed / 255) @ profile
        others, held = fleet.expected, (fleet.context_tokens + fleet.context_tokens.mean()) / 2
        step = prices.fixed_us + prices.expert_us * fleet.distinct + prices.request_us * others
        more = prices.expert_us * added + prices.request_us + prices.context_us * 1000
        prefilled = number % 2 == 1  # then nobody else waits for what is missing
        once = prices.transfer_us if prefilled else prices.prefill_us * (others + 1)
        right = step + prices.context_us * held + (others + 1) * more
        waits = 0 if prefilled else prices.prefill_us / prices.output_tokens * fleet.prefill_tokens
        right = (right + waits + once / prices.output_tokens * (1000 - cached)) / fleet.speeds
        decision = LatencyAware(known, COST).route(Request("r", 1000, counts, None, cached, prefilled), fleet)
        np.testing.assert_allclose(decision.scores, right, rtol=1e-6)
        assert decision.profile is not None
        np.testing.assert_allclose(decision.profile, profile, atol=1e-6)
        np.testing.assert_array_equal(decision.profile, known.profile(counts))
        assert decision.worker == np.argmin(right)


@given(st.lists(st.integers(0, 7), min_size=WORKERS, max_size=WORKERS), st.integers(0, 99), st.booleans())
def test_places_do_not_matter_while_all_have_a_free_one(loads: list[int], seed: int, known: bool) -> None:
    """Scores are bit for bit those of workers without a limit, so decisions are too."""
    drawn = draw(WORKERS * 7 + 1, seed)
    request = Request("r", 100, drawn.prefill[-1] if known else None, None, np.arange(WORKERS))
    scores = []
    for places in (8, 1 << 20):
        fleet = fitted().fleet(places)
        for worker, load in enumerate(loads):
            for number in range(load):
                profile = fitted().profile(drawn.prefill[7 * worker + number])
                fleet.admit(f"{worker}-{number}", worker, 50 * number, profile)
        scores.append(latency_aware().route(request, fleet).scores)
    np.testing.assert_array_equal(scores[0], scores[1])


def overfull(loads: list[int], places: int, rng: np.random.Generator) -> Fleet:
    fleet, drawn = fitted().fleet(places), draw(sum(loads), 3)
    for number, worker in enumerate(np.repeat(np.arange(len(loads)), loads)):
        profile = fitted().profile(drawn.prefill[number])
        fleet.admit(str(number), int(worker), int(rng.integers(2000)), profile)
    return fleet


@pytest.mark.parametrize("known", [True, False])
def test_a_full_worker_is_priced_by_the_batch_it_runs_and_the_wait(known: bool) -> None:
    places, loads = 4, [4, 5, 6, 7, 8, 9]
    fleet = overfull(loads, places, np.random.default_rng(0))
    counts = draw(1, 9).prefill[0]
    decision = LatencyAware(fitted(), COST).route(Request("r", 100, counts if known else None), fleet)
    half_way = (fleet.running + fleet.running.mean()) / 2
    others = np.minimum(half_way, places - 1)
    np.testing.assert_array_equal(fleet.expected, others)
    queued, ahead = half_way - others, fleet.running - places + 1
    held = (fleet.context_tokens + fleet.context_tokens.mean()) / 2 * others / half_way
    touched = fleet.distinct if known else 0.0
    added = (fleet.missed / 255) @ fitted().profile(counts) if known else 0.0
    step = COST.fixed_us + COST.expert_us * touched + COST.request_us * others + COST.context_us * held
    more = COST.expert_us * added + COST.request_us + COST.context_us * 100
    right = step + (others + queued + 1) * more + ahead * (step + more) / places
    np.testing.assert_allclose(decision.scores, right, rtol=1e-6)


def test_a_step_of_a_full_worker_touches_no_more_experts_however_many_wait() -> None:
    """Its own requests alone: every one that waits is as one that runs, so a batch of `places` touches as many."""
    fleet = fitted().fleet(4)
    profile = fitted().profile(draw(1, 1).prefill[0])
    touched = []
    for number in range(64):
        for worker in range(WORKERS):
            fleet.admit(f"{worker}-{number}", worker, 0, profile)
        touched.append(float(fleet.distinct[0]))
    assert max(touched[8:]) == pytest.approx(min(touched[8:]), rel=0.02), "only the prior still moves"


def test_latency_aware_refuses_a_fleet_of_another_model() -> None:
    request = Request("r", 10, draw(1, 0).prefill[0])
    with pytest.raises(ConfigError, match=r"24 expert indices.* 30"):
        latency_aware().route(request, Fleet([4] * WORKERS, np.zeros((WORKERS, 30))))
    with pytest.raises(ConfigError, match=r"\(8, 3\).*\(3, 8\)"):
        latency_aware().route(request._replace(footprint=draw(1, 0).prefill[0].T), fitted().fleet(4))
    with pytest.raises(ConfigError, match="the fleet tracks no experts"):
        latency_aware().route(request, Fleet([4] * WORKERS))
    with pytest.raises(ConfigError, match="'latency_aware' needs cost"):
        routers.make("latency_aware", {"fitted": fitted()})


@given(st.lists(st.integers(0, 9), min_size=2, max_size=8))
def test_where_experts_cost_nothing_it_is_the_shortest_queue(loads: list[int]) -> None:
    fleet = busy(loads)
    router = latency_aware(replace(COST, expert_us=0.0, context_us=0.0))
    assert fleet.running[router.route(Request(), fleet).worker] == min(loads)


def test_a_cached_prefix_is_worth_its_prefill() -> None:
    fleet = busy([3, 3, 3])
    cached = np.array([0, 4000, 0])
    assert latency_aware().route(Request("r", 4096, None, None, cached), fleet).worker == 1
    loaded = busy([3, 40, 3])  # forty others would wait for the request's own steps
    assert latency_aware().route(Request("r", 64, None, None, np.array([0, 32, 0])), loaded).worker != 1


def test_a_prefix_outweighs_experts_only_where_it_must_be_computed() -> None:
    """2,000 cached tokens and 12 requests more: worth the queue if they save a prefill, not if they save a transfer."""
    fleet, cached = busy([3, 15, 3]), np.array([0, 2000, 0])
    router = latency_aware(DecodeStepPrices.of(step_model(get_model("gpt-oss-20b"), "h200", "bf16")))
    assert router.route(Request("r", 2048, None, None, cached), fleet).worker == 1
    assert router.route(Request("r", 2048, None, None, cached, prefilled=True), fleet).worker != 1


@pytest.mark.parametrize("name", ["gpt-oss-20b", "deepseek-v2-lite"])
def test_a_group_is_priced_as_its_ranks_run(name: str) -> None:
    """Steps of a group whose requests touch more or fewer experts: the line's difference is the model's own."""
    spec, rng, requests = get_model(name), np.random.default_rng(1), 64
    model = step_model(spec, "h200", "bf16", Topology(8))
    placement = in_order(model)
    assert placement is not None
    group, alone = (DecodeStepPrices.of(model, requests, 512, placement=one) for one in (placement, None))
    assert group.expert_us < alone.expert_us / 3
    assert group.prefill_us < alone.prefill_us / 4
    assert group.transfer_us == alone.transfer_us
    placed, times = PlacedStepModel(model, placement), []
    for distinct in (spec.num_experts // 4, spec.num_experts * 3 // 4):
        load = np.zeros((spec.num_moe_layers, spec.num_experts), np.int64)
        load[:, :distinct] = round(requests * spec.top_k / distinct)
        steps = [placed.step(rng.permuted(load, axis=1), Batch(8, 8 * 512)).total_s for _ in range(20)]
        times.append(1e6 * float(np.mean(steps)))
        line = group.fixed_us + group.expert_us * spec.num_moe_layers * distinct + group.request_us * requests
        assert line + group.context_us * requests * 512 == pytest.approx(times[-1], rel=0.05)
    more = group.expert_us * spec.num_moe_layers * (spec.num_experts // 2)
    assert times[1] - times[0] == pytest.approx(more, rel=0.15)


def test_prices_of_a_calibrated_model() -> None:
    prices = DecodeStepPrices.of(step_model(get_model("gpt-oss-20b"), "h200", "bf16"))
    assert 0.5 < prices.expert_us < 50
    assert prices.fixed_us > 0
    assert 0 < prices.request_us < prices.fixed_us
    assert prices.prefill_us > prices.context_us
    with pytest.raises(ConfigError, match="expert_us"):
        replace(COST, expert_us=-1.0)


def test_domains_get_workers_by_their_traffic() -> None:
    assert share_out({"code": 60, "chat": 30, "law": 10}, 10) == {
        "code": (0, 1, 2, 3, 4, 5),
        "chat": (6, 7, 8),
        "law": (9,),
    }
    crowded = share_out({"a": 5, "b": 4, "c": 3}, 2)
    assert crowded == {"a": (0,), "b": (1,), "c": (1,)}
    fleet = busy([0, 0, 5, 6])
    router = Domain({"code": (2, 3), "chat": (0, 1)})
    assert router.route(Request(domain="code"), fleet).worker == 2
    assert router.route(Request(domain="law"), fleet).worker in (0, 1)
    fleet.alive[2:] = False
    assert router.route(Request(domain="code"), fleet).worker in (0, 1)
    with pytest.raises(ConfigError, match="worker 3"):
        router.route(Request(domain="code"), Fleet([1, 1]))


def held(experts: list[list[int]]) -> np.ndarray:
    """[worker, layer, word] from the experts each worker holds, the same in every layer."""
    return np.array([[[sum(1 << e for e in mine)]] * LAYERS for mine in experts], np.uint64)


def test_joint_follows_the_articles_sum() -> None:
    fleet = busy([2, 1])
    fleet.local = held([[0, 1, 2, 3], [4, 5, 6, 7]])
    counts = np.zeros((LAYERS, EXPERTS), np.int64)
    counts[:, [0, 1, 4]] = 5
    request = Request("r", 100, counts, None, np.array([50, 0]))
    scores = Joint().route(request, fleet).scores
    assert scores == pytest.approx([50 + 0.5 * (1 / 3) * 8 + 30 * 1.0, 100 + 0.5 * (2 / 3) * 8 + 30 * 0.5])


USES: dict[str, Callable[[np.random.Generator, int], np.ndarray]] = {
    "few whole numbers, with many equal": lambda rng, experts: rng.integers(0, 6, (LAYERS, experts)),
    "large ones": lambda rng, experts: rng.integers(0, 2**20, (LAYERS, experts)).astype(np.uint32),
    "one large one": lambda rng, experts: rng.integers(0, 3, (LAYERS, experts)) * 10 ** rng.integers(0, 6, experts),
    "probabilities": lambda rng, experts: rng.random((LAYERS, experts)).astype(np.float32) ** 8,
    "few different ones": lambda rng, experts: rng.integers(0, 4, (LAYERS, experts)) / 7,
    "mostly nothing": lambda rng, experts: rng.integers(0, 9, (LAYERS, experts)) * (rng.random(experts) < 0.1),
}


@pytest.mark.parametrize("kind", USES)
@given(st.integers(1, 20), st.sampled_from([3, 64, 70, 128]), st.integers(0, 999))
def test_the_experts_of_a_request_are_its_most_used(kind: str, top: int, experts: int, seed: int) -> None:
    use = USES[kind](np.random.default_rng(seed), experts)
    bits = Joint(top=top).bits(Request("r", 1, use))
    assert bits is not None
    for layer in range(LAYERS):
        marked = [e for e in range(64 * bits.shape[1]) if int(bits[layer, e // 64]) >> (e % 64) & 1]
        order = np.argsort(-use[layer], kind="stable")[:top]
        right = sorted(e for e in order if use[layer, e] > 0)
        if use.dtype.kind in "iu" or marked == right:
            assert marked == right, "of equals the first"
        else:  # what is nearer than a millionth of the sum counts as equal
            assert len(marked) == len(right)
            least = use[layer, right].min()
            assert (use[layer, marked] >= least - 1e-6 * use[layer].sum()).all()
