"""Expert maps that workers report: routers follow them and say which, wrong ones are named, requests go on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace

from canned_workers import canned_workers
from coterie.engines.vllm.publisher import EventPublisher
from coterie.errors import InputError
from coterie.gateway.config import GatewayConfig, WorkerEntry
from coterie.gateway.exchange.knowledge import mask_of
from coterie.gateway.fleet.spec import RouterSpec
from coterie.placement import PlacementMap, write_map
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
