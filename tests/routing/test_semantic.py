"""The router `semantic`: local shares and round masks, against the algorithm written out."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from coterie.errors import ConfigError
from coterie.routing import Fleet, Request, Semantic, routers
from coterie.testing import check_router
from coterie.types import Placement
from routing_cases import draw

LAYERS, EXPERTS, RANKS = 3, 8, 4


def placed(seed: int, slots: int = EXPERTS) -> Placement:
    rng = np.random.default_rng(seed)
    rows = [
        np.concatenate([rng.permutation(EXPERTS), rng.integers(0, EXPERTS, slots - EXPERTS)]) for _ in range(LAYERS)
    ]
    return Placement(np.stack(rows).astype(np.int32), RANKS, EXPERTS)


def footprints(count: int, seed: int) -> list[np.ndarray]:
    return list(np.random.default_rng(seed).integers(0, 9, (count, LAYERS, EXPERTS)))


def local_share(placement: Placement, use: np.ndarray, rank: int) -> float:
    """Activation by activation."""
    own = placement.slot_experts.reshape(LAYERS, RANKS, -1)[:, rank]
    local = sum(int(use[layer, expert]) for layer in range(LAYERS) for expert in set(own[layer].tolist()))
    return local / int(use.sum())


def test_contract() -> None:
    check_router(lambda: Semantic(placed(0)), LAYERS, EXPERTS, RANKS)
    check_router(lambda: Semantic(placed(1, slots=12)), LAYERS, EXPERTS, RANKS)


@given(seed=st.integers(0, 9999), slots=st.sampled_from([8, 12]))
def test_scores_are_the_share_of_activations_that_are_not_local(seed: int, slots: int) -> None:
    placement, use = placed(seed, slots), footprints(1, seed)[0]
    decision = Semantic(placement).route(Request("r", 9, use), Fleet([4] * RANKS))
    expected = [1.0 - local_share(placement, use, rank) for rank in range(RANKS)]
    np.testing.assert_allclose(decision.scores, expected, atol=1e-6)
    assert decision.worker == int(np.argmin(decision.scores))
    shown, rest = decision.reason.split("%", 1)
    assert abs(float(shown) - 100 * (1 - decision.scores[decision.worker])) < 0.51, "rounded to whole percent"
    assert rest.startswith(" of its activations are local")


@given(seed=st.integers(0, 9999), count=st.integers(1, 23))
def test_rounds_are_those_of_the_algorithm(seed: int, count: int) -> None:
    """A rank that got a request is masked; when all are, masks are cleared. So counts differ by one at most."""
    placement, fleet = placed(seed), Fleet([64] * RANKS)
    router, masked, given_to = Semantic(placement), set[int](), np.zeros(RANKS, int)
    for number, use in enumerate(footprints(count, seed)):
        decision = router.route(Request(str(number), 9, use), fleet)
        shares = {rank: local_share(placement, use, rank) for rank in range(RANKS) if rank not in masked}
        assert shares[decision.worker] >= max(shares.values()) - 1e-6
        assert set(np.flatnonzero(np.isinf(decision.scores)).tolist()) == masked
        fleet.admit(str(number), decision.worker)
        masked.add(decision.worker)
        given_to[decision.worker] += 1
        if len(masked) == RANKS:
            masked.clear()
        assert set(np.flatnonzero(fleet.in_round).tolist()) == masked
        assert given_to.max() - given_to.min() <= 1


@given(seed=st.integers(0, 9999))
def test_full_dead_and_busy_ranks_are_passed_over_and_rounds_go_on(seed: int) -> None:
    """Whatever happens to the fleet, an open rank without a request in this round comes before one with."""
    rng, placement = np.random.default_rng(seed), placed(seed)
    fleet, router, running = Fleet(rng.integers(1, 5, RANKS)), Semantic(placement), list[str]()
    for number, use in enumerate(footprints(60, seed)):
        if running and rng.random() < 0.45:
            fleet.finish(running.pop(int(rng.integers(len(running)))))
        if rng.random() < 0.1:
            fleet.alive[rng.integers(RANKS)] ^= True
            if not fleet.alive.any():
                fleet.alive[0] = True
        decision = router.route(Request(str(number), 9, use), fleet)
        assert fleet.open[decision.worker]
        mean = fleet.running[fleet.alive].mean()
        light = fleet.open & (fleet.running <= max(1.25 * mean, mean + 1))
        if light.any():
            assert light[decision.worker]
            if (light & ~fleet.in_round).any():
                assert not fleet.in_round[decision.worker]
        fleet.admit(str(number), decision.worker)
        running.append(str(number))
    fleet.alive[:] = True
    assert not fleet.in_round.all()


def test_more_activations_are_local_than_in_turn_and_every_rank_gets_its_share() -> None:
    """Four groups of requests, each at home on one rank: in turn a quarter is local, as by chance."""
    drawn, placement, share = draw(200, 1), Placement.linear(LAYERS, EXPERTS, RANKS), {}
    for name in ("semantic", "round_robin"):
        fleet, router = Fleet([64] * RANKS), routers.make(name, {"placement": placement})
        local = []
        for number, use in enumerate(drawn.prefill):
            worker = router.route(Request(str(number), 9, use), fleet).worker
            fleet.admit(str(number), worker)
            local.append(local_share(placement, use, worker))
        share[name] = np.mean(local)
        assert fleet.running.tolist() == [50] * RANKS
    assert abs(share["round_robin"] - 0.25) < 0.05
    assert share["semantic"] > 1.5 * share["round_robin"]


def test_a_rank_far_above_the_mean_waits_although_it_is_its_turn() -> None:
    placement, fleet = Placement.linear(LAYERS, EXPERTS, RANKS), Fleet([64] * RANKS)
    fleet.in_flight[:] = [9, 4, 4, 4]
    use = np.zeros((LAYERS, EXPERTS), int)
    use[:, :2] = 5  # all of it on rank 0
    decision = Semantic(placement).route(Request("r", 9, use), fleet)
    assert decision.scores[0] == np.inf
    assert decision.worker != 0
    fleet.speeds[0] = 3.0
    assert Semantic(placement).route(Request("r", 9, use), fleet).worker == 0


def test_without_a_footprint_the_least_busy_rank_of_the_round() -> None:
    placement, fleet = Placement.linear(LAYERS, EXPERTS, RANKS), Fleet([64] * RANKS)
    fleet.admit("a", 2)
    fleet.in_flight[:] = [3, 2, 1, 3]
    decision = Semantic(placement).route(Request("r"), fleet)
    assert (decision.worker, decision.scores[2]) == (1, np.inf)
    assert "nothing is known of its experts" in decision.reason


def test_what_does_not_fit_is_refused() -> None:
    placement = Placement.linear(LAYERS, EXPERTS, RANKS)
    with pytest.raises(ConfigError, match="'semantic' needs placement"):
        routers.make("semantic", {"seed": 0})
    router = routers.make("semantic", {"placement": placement, "seed": 0})
    with pytest.raises(ConfigError, match=r"4 ranks.* 3 workers"):
        router.route(Request("r"), Fleet([4] * 3))
    with pytest.raises(ConfigError, match=r"footprint has shape \(2, 8\)"):
        router.route(Request("r", 1, np.ones((2, EXPERTS))), Fleet([4] * RANKS))
    with pytest.raises(ConfigError, match=r"most=0.5 must be at least 1"):
        Semantic(placement, 0.5)
