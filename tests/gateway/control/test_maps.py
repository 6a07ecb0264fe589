"""Expert maps that workers report: routers follow them and say which, wrong ones are named, requests go on."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from msgspec.structs import replace

from canned_workers import canned_workers
from control_cases import saved_fit
from coterie.control import SwitchbackSettings
from coterie.engines.vllm.publisher import EventPublisher
from coterie.errors import InputError
from coterie.gateway.config import ControlSection, GatewayConfig, WorkerEntry
from coterie.gateway.control.live import LiveControl
from coterie.gateway.control.messages import UseFit
from coterie.gateway.exchange.knowledge import mask_of
from coterie.gateway.fleet.spec import RouterSpec
from coterie.net.access import FleetAccess
from coterie.placement import PlacementMap, write_map
from coterie.registry import needs
from coterie.routing import Decision, Fleet, JoinShortestQueue, Request, RouterFit, routers
from coterie.types import Placement
from coterie.wire.expert_events import ExpertEvents, ExpertMap, decode_expert_events, encode_expert_events
from gateway_runs import FAST, Run, gateway, run
from http1_peers import until

LAYERS, EXPERTS, RANKS = 2, 8, 2
LINEAR = Placement.linear(LAYERS, EXPERTS, RANKS)
TURNED = Placement(LINEAR.slot_experts[:, ::-1].copy(), RANKS, EXPERTS)


def event_of(placement: Placement, version: int = 1) -> ExpertMap:
    slots = [row.astype("<u2").tobytes() for row in placement.slot_experts]
    return ExpertMap(num_experts=placement.num_experts, num_ranks=placement.num_ranks, version=version, slots=slots)


def test_a_map_travels_whole_and_one_that_cannot_be_is_refused() -> None:
    event = event_of(TURNED, 7)
    (again,) = decode_expert_events(encode_expert_events(ExpertEvents(0.0, [event]))).events
    assert isinstance(again, ExpertMap)
    assert again == event
    np.testing.assert_array_equal(again.placement().slot_experts, TURNED.slot_experts)
    whole = event.slots[0]
    wrongs: tuple[dict[str, Any], ...] = (
        {"slots": []},
        {"slots": [whole, whole[:-2]]},
        {"slots": [whole[:-1]]},
        {"slots": [whole], "num_ranks": 3},
        {"slots": [whole], "num_ranks": 0},
        {"num_experts": 9},
        {"num_experts": 7},
        {"num_experts": 1 << 40},
    )
    for wrong in wrongs:
        with pytest.raises(InputError, match="is no map"):
            replace(event, **wrong).placement()


def masks(found: Run) -> np.ndarray | None:
    local = found.running.parts.pools["decode"].keeper.fleet.local
    return None if local is None else local.copy()


def expected(placement: Placement) -> np.ndarray:
    return np.stack([mask_of(placement, rank) for rank in range(RANKS)])


async def versions(found: Run) -> list[int | None]:
    return [one["map_version"] for one in (await found.client.ask("GET", "/workers")).json["workers"]]


@pytest.mark.parametrize("router", ["joint", "semantic"])
def test_routers_follow_the_maps_that_workers_report(router: str, tmp_path: Path) -> None:
    """Without a fit too: joint and semantic need none. A gateway that comes late is greeted with the map in force."""
    write_map(tmp_path / "map.json", PlacementMap(LINEAR, "made"), "native")
    path = str(tmp_path / "map.json")
    spec = RouterSpec(router, placement=path if router == "semantic" else None)
    publishers = [EventPublisher(f"ipc://{tmp_path}/{rank}", rank, 16) for rank in range(RANKS)]
    for publisher in publishers:
        publisher.greeting = event_of(LINEAR)

    async def test() -> None:
        async with canned_workers("a", "b") as workers:
            entries = [
                WorkerEntry(id=worker.name, url=worker.url, expert_events=publisher.endpoint, placement_rank=rank)
                for rank, (worker, publisher) in enumerate(zip(workers, publishers, strict=True))
            ]
            config = GatewayConfig(workers=entries, listen="127.0.0.1:0", health=FAST, decode=spec, placement=path)
            async with gateway(config) as found:
                parts = found.running.parts
                await until(lambda: len(parts.knowledge.maps) == RANKS)
                np.testing.assert_array_equal(masks(found), expected(LINEAR))
                assert await versions(found) == [1, 1]
                for publisher in publishers:
                    publisher.publish(event_of(TURNED, 2))
                await until(lambda: all(one.version == 2 for one in parts.knowledge.maps.values()))
                np.testing.assert_array_equal(masks(found), expected(TURNED))
                if router == "semantic":
                    placement = parts.pools["decode"].keeper._made.router.placement  # type: ignore[attr-defined]
                    np.testing.assert_array_equal(placement.slot_experts, TURNED.slot_experts)
                assert (await found.client.complete()).status == 200

                publishers[0].publish(event_of(Placement.linear(LAYERS + 1, EXPERTS, RANKS), 3))
                publishers[0].publish(event_of(Placement.linear(LAYERS, EXPERTS, 1), 4))
                publishers[1].publish(replace(event_of(LINEAR, 3), num_experts=9))
                publishers[1].publish(event_of(Placement.linear(LAYERS, EXPERTS, 1), 4))
                # Lines are written by a thread of their own, some time after what they say.
                await until(lambda: "map 4 of worker 'b' is ignored: rank=1 must be" in found.said.getvalue())
                wrong = "map 3 of worker 'a' is ignored: it has (3, 8) layers and experts, expected (2, 8)"
                await until(lambda: wrong in found.said.getvalue())
                await until(lambda: parts.knowledge.maps["a"].version == 4)
                assert parts.knowledge.maps["b"].version == 2
                assert (await found.client.complete()).status == 200

    try:
        run(test)
    finally:
        for publisher in publishers:
            publisher.close()


@dataclass(frozen=True, slots=True)
class Both:
    """A router that is made from a placement and a fit."""

    placement: Placement = needs("a placement")
    fitted: RouterFit = needs("a fit")

    def route(self, request: Request, fleet: Fleet) -> Decision:
        return JoinShortestQueue().route(request, fleet)


def test_a_reported_map_survives_every_swap_of_the_router(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`semantic` was made from the file again, so it routed by where the experts had been."""
    monkeypatch.setitem(routers._items, "both", Both)
    path, fit = tmp_path / "fleet.yaml", saved_fit("low", tmp_path)
    map_path = str(tmp_path / "map.json")
    write_map(tmp_path / "map.json", PlacementMap(LINEAR, "made"), "native")

    async def test() -> None:
        async with canned_workers("a", "b") as workers:
            entries = [
                WorkerEntry(
                    id=worker.name, url=worker.url, expert_events=f"ipc://{tmp_path}/{rank}", placement_rank=rank
                )
                for rank, worker in enumerate(workers)
            ]
            spec = RouterSpec("semantic", placement=map_path)
            config = GatewayConfig(
                workers=entries,
                listen="127.0.0.1:0",
                health=FAST,
                decode=spec,
                placement=map_path,
                control=ControlSection(enabled=False),
                switchback=SwitchbackSettings(enabled=True),
            )

            def keeps(placement: Placement = TURNED, router: str = "semantic") -> None:
                assert pool.spec.router == router
                made: Any = pool.keeper._made.router
                np.testing.assert_array_equal(made.placement.slot_experts, placement.slot_experts)
                np.testing.assert_array_equal(masks(found), expected(placement))

            async def put(**body: object) -> None:
                got = await found.client.ask("PUT", "/routers/decode", body)
                assert got.status == 200, got.body

            async def reload(**changes: Any) -> None:
                path.write_bytes(msgspec.yaml.encode(replace(config, **changes)))
                await found.running.reload()

            async with gateway(config, path) as found:
                parts = found.running.parts
                pool = parts.pools["decode"]
                keeps(LINEAR)
                for entry in entries:
                    parts.follow_map(entry.id, event_of(TURNED, 2))
                keeps()

                await put(router="semantic:most=1.5")
                keeps(router="semantic:most=1.5")
                await put(router="round_robin")
                await put(router="semantic")
                keeps()
                await reload(drain_s=3.0)
                keeps()
                await reload(decode=RouterSpec("semantic:most=2", placement=map_path))
                keeps(router="semantic:most=2")
                await reload(workers=[replace(entries[0], places=5), entries[1]])
                keeps()
                refused = await found.client.ask("PUT", "/routers/decode", {"router": "semantic:most=0"})
                assert refused.status == 400
                keeps()
                for _ in range(3):
                    parts.turn()
                    keeps()

                await put(router="both", fit=fit)
                keeps(router="both")
                control = parts.control = LiveControl(
                    config.control, pool, parts.entries, FleetAccess(), parts.metrics, parts.log, parts.follow_map
                )
                again = str(tmp_path / "again.safetensors")
                RouterFit.load(fit).save(Path(again))
                await control._swap(UseFit(0, 1, again))
                assert pool.spec.fit == again
                keeps(router="both")
                await reload()  # ends the loop, whose fit goes with it
                assert not vars(parts)["control"]
                assert pool.spec.fit == fit
                keeps(router="both")
                await put(router="semantic", fit=None)
                keeps()

                parts.remove_worker("b")
                await put(router="semantic:most=3")
                made: Any = pool.keeper._made.router
                np.testing.assert_array_equal(made.placement.slot_experts, TURNED.slot_experts)
                parts.remove_worker("a")
                for entry in entries:
                    parts.add_worker(entry)
                await put(router="semantic")
                keeps(LINEAR)

    run(test)
