"""Plans that a real gateway writes: confirmed by the maps that workers report, or said not to be taken."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from canned_workers import canned_workers
from control_cases import EXPERTS, LAYERS, load_event, saved_fit
from coterie.control.base import LoopShape
from coterie.engines.vllm.publisher import EventPublisher
from coterie.errors import ConfigError
from coterie.gateway.config import AdviseSection, ControlSection, GatewayConfig, WorkerEntry
from coterie.gateway.control.driver import advisor_of
from coterie.gateway.exchange.knowledge import mask_of
from coterie.gateway.fleet.spec import RouterSpec
from coterie.gateway.page.snapshot import PageQuery, snapshot
from coterie.models import get_model
from coterie.placement.maps.formats import PlacementMap, read_map, write_map
from coterie.types import Placement
from coterie.wire.expert_events import ExpertMap
from gateway_runs import FAST, Run, gateway, run
from http1_peers import until

RANKS = 2
START = Placement.linear(LAYERS, EXPERTS, RANKS)
OTHER = Placement(np.roll(START.slot_experts, 3, axis=1), RANKS, EXPERTS)
ADVISE = AdviseSection(ranks=RANKS, window_s=0.3, min_steps=1, horizon=1e9, cooldown_s=3600.0)


def event_of(placement: Placement, version: int) -> ExpertMap:
    slots = [row.astype("<u2").tobytes() for row in placement.slot_experts]
    return ExpertMap(num_experts=placement.num_experts, num_ranks=placement.num_ranks, version=version, slots=slots)


class Group:
    """A gateway before two ranks that report their loads, all of it for rank 0's experts, and, unless old, maps."""

    def __init__(self, found: Run, publishers: list[EventPublisher], map: Path) -> None:
        self.found, self.publishers, self.map = found, publishers, map
        self.rng = np.random.default_rng(0)

    def advice(self) -> dict[str, Any]:
        """What the page shows, while the ranks go on reporting loads."""
        for publisher in self.publishers:
            publisher.publish(msgspec.structs.replace(load_event("low", self.rng), seconds=1e-3))
        advice: dict[str, Any] | None = snapshot(self.found.running.parts, 0.0, PageQuery())["loop"]["advice"]
        return advice or {}

    async def comes_to(self, state: str) -> dict[str, Any]:
        await until(lambda: self.advice().get("state") == state)
        shown: dict[str, Any] = (await self.found.client.ask("GET", "/advice")).json["advice"]
        assert shown["state"] == state
        return shown

    async def events(self, kind: str, count: int = 1) -> list[dict[str, Any]]:
        """The events of a kind, once there are so many."""
        control = self.found.running.parts.control
        assert control is not None
        await until(lambda: self.advice() is not None and sum(one["kind"] == kind for one in control.events) >= count)
        told = (await self.found.client.ask("GET", "/decisions")).json["control"]
        return [event for event in told if event["kind"] == kind]


def with_group(folder: Path, old: int | None, test: Callable[[Group], Any]) -> None:
    """Run a test; rank `old` has a plugin that reports no maps."""
    publishers = [EventPublisher(f"ipc://{folder}/{rank}", rank, 64) for rank in range(RANKS)]
    for rank, publisher in enumerate(publishers):
        publisher.greeting = None if rank == old else event_of(START, 1)
    map = folder / "map.json"
    control = ControlSection(advise=ADVISE, apply=True, map=str(map), tick_s=0.05, confirm_s=3600.0)

    async def go() -> None:
        async with canned_workers("a", "b") as workers:
            entries = [
                WorkerEntry(id=worker.name, url=worker.url, expert_events=publisher.endpoint, placement_rank=rank)
                for rank, (worker, publisher) in enumerate(zip(workers, publishers, strict=True))
            ]
            spec = RouterSpec("joint", fit=saved_fit("low", folder))
            config = GatewayConfig(
                workers=entries, listen="127.0.0.1:0", health=FAST, decode=spec, control=control, handshake="none"
            )
            async with gateway(config) as found:
                reporting = RANKS - (old is not None)
                await until(lambda: len(found.running.parts.knowledge.maps) == reporting)
                await test(Group(found, publishers, map))
                assert (await found.client.complete()).status == 200

    try:
        run(go)
    finally:
        for publisher in publishers:
            publisher.close()


@pytest.mark.parametrize("old", [None, 1])
def test_a_written_plan_is_pending_until_every_rank_that_reports_maps_has_it(tmp_path: Path, old: int | None) -> None:
    """In any order; a rank with an old plugin is not waited for, and is routed as before."""

    async def test(group: Group) -> None:
        shown = await group.comes_to("pending")
        assert shown["maps"] == {"a": 1} | ({} if old else {"b": 1})
        planned = read_map(group.map, num_ranks=RANKS).placement
        for rank in (1, 0):
            if rank != old:
                group.publishers[rank].publish(event_of(planned, 2))
        shown = await group.comes_to("applied")
        assert shown["map_version"] == shown["in_force"] == 2
        (event,) = await group.events("plan_confirmed")
        assert event["values"]["version"] == 2
        parts = group.found.running.parts
        local = parts.pools["decode"].keeper.fleet.local
        if old is None:
            assert local is not None
            np.testing.assert_array_equal(local, np.stack([mask_of(planned, rank) for rank in range(RANKS)]))
        status = (await group.found.client.ask("GET", "/workers")).json["workers"]
        assert [worker["map_version"] for worker in status] == [2, None if old else 2]

    with_group(tmp_path, old, test)


def test_another_map_than_the_written_one_is_reported_and_advice_goes_on_from_it(tmp_path: Path) -> None:
    async def test(group: Group) -> None:
        await group.comes_to("pending")
        group.publishers[1].publish(event_of(Placement.linear(LAYERS, EXPERTS, 1), 2))  # no map of this group
        group.publishers[1].publish(event_of(OTHER, 3))
        event = (await group.events("plan_not_taken"))[0]
        assert "worker 'b' reports another map, version 3: layers 0, 1 on ranks 0, 1 differ" in event["reason"]
        ignored = [event["reason"] for event in await group.events("ignored")]
        assert "map 2 of worker 'b': (2, 16, 1) layers, experts and ranks, expected (2, 16, 2)" in ignored
        await until(lambda: "was not taken" in group.found.said.getvalue())
        group.publishers[0].publish(event_of(OTHER, 2))
        await group.events("plan_written", 2)
        again = read_map(group.map, num_ranks=RANKS).placement
        kept = (again.slot_experts == OTHER.slot_experts).sum()
        assert kept > (again.slot_experts == START.slot_experts).sum(), "the next plan moves from what is in force"

    with_group(tmp_path, None, test)


def test_spare_slots_are_priced_in_kv_cache() -> None:
    """A spare slot holds one expert of all layers: as many bytes as so many tokens cache."""
    spec = get_model("gpt-oss-20b")
    shape = LoopShape("gpt-oss-20b", spec.num_layers, spec.num_experts, spec.top_k, 2)
    router = RouterSpec(router="latency_aware", dtype="bf16")
    tokens = [advisor_of(AdviseSection(ranks=8, slots_per_rank=slots), shape, router)[1] for slots in (4, 6)]
    cached = 2 * 2 * 8 * 64 * 24  # keys and values, 16 bits, 8 heads of 64, 24 layers
    assert tokens == pytest.approx([0.0, 2 * 24 * 3 * 2880 * 2880 * 2 / cached])


def test_a_map_in_force_with_shares_is_refused(tmp_path: Path) -> None:
    """The loop advises engines that share tokens of replicas equally."""
    spec = get_model("gpt-oss-20b")
    shape = LoopShape(spec.name, spec.num_layers, spec.num_experts, spec.top_k, 2)
    placement = Placement.linear(spec.num_layers, spec.num_experts, 8)
    path = tmp_path / "map.json"
    write_map(path, PlacementMap(placement, spec.name, shares=np.ones(placement.slot_experts.shape)))
    with pytest.raises(ConfigError, match="split 'weighted' must be equal: vLLM"):
        advisor_of(AdviseSection(ranks=8, placement=str(path)), shape, RouterSpec(router="latency_aware"))
