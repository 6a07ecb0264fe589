"""The keeper of a pool: any router, any request, workers that come and go."""

from __future__ import annotations

import itertools
from typing import Any

import msgspec
import numpy as np
import pytest

from books import check_keeper
from coterie.errors import ConfigError, UnavailableError
from coterie.gateway.fleet.keeper import FleetKeeper
from coterie.gateway.fleet.spec import Made, RouterSpec, prices_of
from coterie.routing import Decision, Fleet, Request, Router, RouterFit, routers
from coterie.types import Placement
from routing_cases import COST, EXPERTS, LAYERS, WORKERS, draw, fitted

FOOTPRINTS = draw(40, 1).prefill
PLACEMENT = Placement.linear(LAYERS, EXPERTS, 4)


def context() -> dict[str, Any]:
    return {"fitted": fitted(), "cost": COST, "placement": PLACEMENT, "labels": {"code": (0, 1)}}


def pool(workers: int = 3, router: str = "join_shortest_queue", places: int = 4) -> FleetKeeper:
    keeper = FleetKeeper(RouterSpec(router=router), context())
    for number in range(workers):
        keeper.join(f"w{number}", places)
    return keeper


def state(keeper: FleetKeeper) -> dict[str, Any]:
    """All that a decision may read of the fleet."""
    values = {name: value for name, value in vars(keeper.fleet).items() if name not in ("_residents", "heard")}
    heard = {f"heard {name}": value for name, value in keeper.fleet.heard._asdict().items()}
    return {name: np.copy(value) for name, value in (values | heard).items()}


@pytest.mark.parametrize("name", sorted(routers))
def test_every_router_works_by_name(name: str) -> None:
    keeper = pool(4, name)
    chosen = [
        keeper.route(f"r{number}", Request("", 100, FOOTPRINTS[number], "code", np.zeros(keeper.rows, np.int64)))
        for number in range(8)
    ]
    assert not keeper.fallbacks
    assert all(choice.fallback is None and choice.worker_id == f"w{choice.row}" for choice in chosen)
    keeper.leave("w1")
    keeper.set_open("w2", False)
    more = [keeper.route(f"s{number}", Request("", 100, FOOTPRINTS[number])) for number in range(8)]
    assert {choice.worker_id for choice in more} <= {"w0", "w3"}
    assert not keeper.fallbacks
    for one in [*(f"r{n}" for n in range(8)), *(f"s{n}" for n in range(8))]:
        assert keeper.finish(one)
    check_keeper(keeper)
    assert not keeper.fleet.running.any()


@pytest.mark.parametrize("dtype", ["u1", "u2", "<u4", ">u4", "i2", "f2", "f4", "f8"])
def test_footprints_of_any_type_are_the_same(dtype: str) -> None:
    counts = np.minimum(FOOTPRINTS[3], 100)
    scores = [
        pool(4, "latency_aware").route("r", Request("", 10, footprint)).decision.scores
        for footprint in (counts, counts.astype(dtype), np.asfortranarray(counts.astype(dtype)))
    ]
    for one in scores[1:]:
        np.testing.assert_allclose(one, scores[0], rtol=1e-6)


def test_cached_tokens_by_row() -> None:
    keeper = pool(3, "joint")
    by_row = keeper.route("a", Request("", 100, cached_tokens=np.array([0, 0, 90, 0, 0, 0])))
    assert by_row.worker_id == "w2"
    short = keeper.route("c", Request("", 100, cached_tokens=np.array([90], np.uint16)))
    assert short.worker_id == "w0", "made before the pool grew"
    too_much = keeper.route("d", Request("", 100, cached_tokens=np.array([0, 10**15, -5])))
    assert too_much.worker_id == "w1"
    assert "100 of 100" in too_much.decision.reason


def test_closed_and_excluded_workers() -> None:
    keeper = pool(3)
    keeper.route("busy", Request(), exclude=["w1", "w2"])
    for worker in ("w0", "w1", "w2"):
        keeper.set_open(worker, False)
    choice = keeper.route("a", Request())
    assert choice.fallback == "all_closed"
    assert choice.worker_id != "w0", "the least loaded"
    assert "all workers are closed" in choice.decision.reason
    assert keeper.route("b", Request(), exclude=["w1", "w2"]).worker_id == "w0", "closed rather than excluded"
    keeper.set_open("w2", True)
    choice = keeper.route("c", Request(), exclude=["w0", "w1", "w2"])
    assert (choice.worker_id, choice.fallback) == ("w2", "all_excluded")
    choice = keeper.route("d", Request(), exclude=["w0", "stranger"])
    assert (choice.worker_id, choice.fallback) == ("w2", None)
    assert keeper.fallbacks == {"all_closed": 2, "all_excluded": 1}
    check_keeper(keeper)


def test_a_retry_moves_a_request() -> None:
    keeper = pool(2)
    first = keeper.route("r", Request("", 50))
    assert keeper.route("r", Request("", 50)) is first, "told twice"
    second = keeper.route("r", Request("", 50), exclude=[first.worker_id])
    assert second.worker_id != first.worker_id
    assert len(keeper.requests) == 1
    assert keeper.fleet.context_tokens.sum() == 50
    assert keeper.finish("r")
    assert not keeper.finish("r")
    third = keeper.route("r", Request("", 50))
    assert keeper.running(third.worker_id) == 1


def test_an_empty_pool_is_unavailable() -> None:
    keeper = FleetKeeper()
    with pytest.raises(UnavailableError, match="no workers"):
        keeper.route("r", Request())
    keeper.join("w0", 1)
    keeper.leave("w0")
    with pytest.raises(UnavailableError, match="no workers"):
        keeper.route("r", Request())
    assert not keeper.members


def test_rows_stay_with_their_workers() -> None:
    keeper = FleetKeeper()
    assert [keeper.join(name, 4) for name in "abc"] == [0, 1, 2]
    keeper.route("r", Request(), exclude=["a", "c"])
    keeper.leave("b")
    assert keeper.join("d", 4) == 3, "row 1 still has a request"
    keeper.leave("a")
    keeper.leave("c")
    assert keeper.join("c", 4) == 2, "it comes back"
    assert keeper.join("e", 4) == 0, "the first that was left, with nothing running"
    assert keeper.join("b", 9) == 1
    assert keeper.running("b") == 1
    assert keeper.finish("r")
    assert keeper.join("a", 4) == 4
    assert keeper.ids == ["e", "b", "c", "d", "a"]
    assert keeper.fleet.places.tolist() == [4, 9, 4, 4, 4]
    check_keeper(keeper)


def test_a_fit_serves_more_workers_and_fewer() -> None:
    keeper = FleetKeeper(RouterSpec(router="locality_band:band=0"), context())
    keeper.join("w0", 99)
    assert keeper.rows == WORKERS
    assert keeper.route("first", Request("", 1, FOOTPRINTS[0])).fallback is None
    for number in range(1, WORKERS + 3):
        keeper.join(f"w{number}", 99)
    assert keeper.rows == WORKERS + 3
    rows = [keeper.route(f"r{n}", Request("", 1, counts)).row for n, counts in enumerate(FOOTPRINTS)]
    assert not keeper.fallbacks
    assert set(rows) >= set(range(WORKERS, WORKERS + 3)), "the repeated rows share their cluster's requests"
    check_keeper(keeper)


def test_what_a_worker_learned_stays_when_the_pool_grows() -> None:
    keeper = pool(WORKERS, "latency_aware")
    for number in range(8):
        keeper.route(f"r{number}", Request("", 9, FOOTPRINTS[number]))
    before = state(keeper)
    keeper.join("one more", 4)
    after = state(keeper)
    for name in ("running", "context_tokens", "_logs", "_prior", "_profiled"):
        np.testing.assert_array_equal(before[name], after[name][:WORKERS], err_msg=name)
    assert keeper.fleet.routed == 8
    check_keeper(keeper)


def test_reload_keeps_requests_and_refuses_what_cannot_be_made() -> None:
    keeper = pool(3, "latency_aware")
    for number in range(5):
        keeper.route(f"r{number}", Request("", 9, FOOTPRINTS[number]))
    running = keeper.fleet.running.copy()
    keeper.reload(RouterSpec(router="round_robin"))
    assert keeper.rows == 3, "rows that the fit had and nobody used are gone"
    assert keeper.fleet.running.tolist() == running[:3].tolist()
    check_keeper(keeper)
    refused = [
        RouterSpec(router="join_shortest"),
        RouterSpec(router="locality_band"),
        RouterSpec(router="locality_band", fit="/nowhere/fit.safetensors"),
        RouterSpec(router="joint:kv=-1"),
        RouterSpec(router="joint:kv=much"),
        RouterSpec(router="joint:speed=1"),
        RouterSpec(router="power_of_two:seed=first"),
        RouterSpec(router="latency_aware", model="gpt-oss-20b"),
        RouterSpec(router="semantic", placement="/nowhere/placement.json"),
        RouterSpec(router="domain"),
    ]
    for spec in refused:
        with pytest.raises(ConfigError, match=spec.router):
            keeper.reload(spec)
        assert keeper.route(f"x{spec.router}", Request()).fallback is None
    keeper.reload(RouterSpec(router="latency_aware"), context())
    for number in range(5):
        assert keeper.finish(f"r{number}")
    check_keeper(keeper)


def test_a_plugin_that_fails_on_a_plain_request_is_refused() -> None:
    keeper = pool(2)

    class Fails:
        def route(self, request: Request, fleet: Fleet) -> Decision:
            raise ZeroDivisionError(request.id, len(fleet))

    with pytest.raises(ConfigError, match="ZeroDivisionError"):
        keeper.reload(lambda pool: Made("fails", Fails(), Fleet([1] * pool.rows)))
    with pytest.raises(ConfigError, match=r"1 rows.* 2"):
        keeper.reload(lambda _: Made("random", routers.make("random"), Fleet([1])))
    assert keeper.route("r", Request()).fallback is None


def test_ranks_have_the_rows_of_their_placement() -> None:
    keeper = FleetKeeper(RouterSpec(router="semantic"), context())
    assert [keeper.join(f"rank{rank}", 4) for rank in range(4)] == [0, 1, 2, 3]
    counts = np.zeros((LAYERS, EXPERTS), np.int64)
    counts[:, 4:6] = 9
    assert keeper.route("r", Request("", 9, counts)).worker_id == "rank2"
    with pytest.raises(ConfigError, match=r"4 ranks.* 5"):
        keeper.join("rank4", 4)
    keeper.leave("rank2")
    assert keeper.join("spare", 4) == 2, "though its request still runs: there is no other rank"
    with pytest.raises(ConfigError, match="ranks"):
        pool(5).reload(RouterSpec(router="semantic"), context())


def test_a_worker_is_priced_as_what_it_is() -> None:
    spec = RouterSpec("latency_aware", model="deepseek-v2-lite", dtype="bf16")
    alone, group, slow, kernels = (
        prices_of(msgspec.structs.replace(spec, **changed), None)
        for changed in ({}, {"ranks": 4}, {"kv_gb_s": 25.0}, {"engine": "kernels"})
    )
    assert group.expert_us < alone.expert_us / 2
    assert group.prefill_us < alone.prefill_us / 2
    assert slow.transfer_us == pytest.approx(2 * alone.transfer_us)
    assert kernels.expert_us != alone.expert_us
    for wrong in ({"ranks": 0}, {"kv_gb_s": 0.0}):
        with pytest.raises(ConfigError, match=next(iter(wrong))):
            RouterSpec("latency_aware", **wrong)


def test_labels_name_workers() -> None:
    spec = RouterSpec(router="domain", labels={"code": ["b", "later"], "law": ["nobody"]})
    keeper = FleetKeeper(spec)
    for name in "abc":
        keeper.join(name, 9)
    for number in range(3):
        assert keeper.route(f"r{number}", Request(domain="code")).worker_id == "b"
    assert keeper.route("law", Request(domain="law")).worker_id != "b"
    keeper.finish("law")
    keeper.leave("a")
    assert keeper.join("later", 9) == 0
    chosen = {keeper.route(f"s{number}", Request(domain="code")).worker_id for number in range(6)}
    assert chosen == {"b", "later"}
    check_keeper(keeper)


def test_masks_of_experts() -> None:
    keeper = FleetKeeper(RouterSpec(router="joint:load=0"), context())
    keeper.join("w1", 4)
    keeper.join("w0", 4, held=np.full((LAYERS, 1), 0b1111, np.uint64))
    local = keeper.fleet.local
    assert local is not None
    assert local.shape == (WORKERS, LAYERS, 1)
    assert local[1].tolist() == [[0b1111]] * LAYERS
    counts = np.zeros((LAYERS, EXPERTS), np.int64)
    counts[:, 5] = 9
    assert {keeper.route(f"r{n}", Request("", 0, counts)).worker_id for n in range(3)} == {"w1"}, "who holds all"
    words = np.full((LAYERS, 1), 0b100000, np.uint64)
    keeper.join("w2", 4, held=words)
    keeper.set_open("w1", False)
    assert keeper.route("s", Request("", 0, counts)).worker_id == "w2"
    keeper.leave("w0")
    keeper.leave("w2")
    assert keeper.fleet.local is None
    check_keeper(keeper)


def test_the_same_seed_gives_the_same_choices() -> None:
    def choices(seed: int) -> list[str]:
        keeper = FleetKeeper(RouterSpec(router="random", seed=seed))
        for name in "abcd":
            keeper.join(name, 9)
        return [keeper.route(str(number), Request()).worker_id for number in range(12)]

    assert choices(1) == choices(1) != choices(2)


def test_turns_are_even_after_workers_left() -> None:
    keeper = pool(WORKERS, "round_robin", places=99)
    for gone in ("w1", "w2", "w3"):
        keeper.leave(gone)
    chosen = [keeper.route(str(number), Request()).worker_id for number in range(6)]
    assert chosen == list(itertools.islice(itertools.cycle(["w0", "w4", "w5"]), 6))


def test_a_router_is_any_object_with_a_route(tmp_path: Any) -> None:
    file = tmp_path / "fit.safetensors"
    fitted().save(file)
    spec = RouterSpec(router="latency_aware", fit=str(file), model="gpt-oss-20b", device="h200")
    keeper = FleetKeeper(spec)
    keeper.join("w0", 4)
    assert keeper.rows == WORKERS
    router: Router = keeper._made.router
    assert isinstance(getattr(router, "fitted", None), RouterFit)
    assert keeper.route("r", Request("", 9, FOOTPRINTS[0])).fallback is None
    with pytest.raises(ConfigError, match=r"latency_aware.*Unknown model 'test'"):
        FleetKeeper(RouterSpec(router="latency_aware", fit=str(file)))
