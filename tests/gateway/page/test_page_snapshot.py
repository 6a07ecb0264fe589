"""What the page is told: whole, bounded whatever the fleet and the loop hold, and in words."""

from __future__ import annotations

import math
from typing import Any

import msgspec
import numpy as np
import pytest

from canned_workers import canned_workers, says
from coterie.control import KINDS
from coterie.control.switchback import Comparison, RouterChange
from coterie.gateway.config import AdviseSection, ControlSection, GatewayConfig, WorkerEntry
from coterie.gateway.control.driver import MOST_CELLS, as_map
from coterie.gateway.control.messages import ControlView, HeatMap
from coterie.gateway.embedded import tiny_fit_path
from coterie.gateway.fleet.spec import RouterSpec
from coterie.gateway.page.snapshot import CHANGES, MOST_CANDIDATES, MOST_DECISIONS, PageQuery, heat, snapshot, verdict
from coterie.gateway.parts import GatewayParts
from coterie.routing import Decision
from gateway_runs import FAST, config_of, gateway, run
from shown_control import ShownControl, full_view

NOW = 1_700_000_000.0
MINUTE = {"seconds": 60.0, "ended": 0, "failed": 0, "refused": 0, "ttft_ms": {"p50": None}, "tpot_ms": {"p50": None}}
QUIET: dict[str, Any] = {"events": [], "advice": None, "can_apply": False, "to_apply": None}
MOST_BYTES = 700_000
"""Most bytes of a snapshot of the largest fleet, with every text at its longest."""


def shown(parts: GatewayParts, **asked: str) -> Any:
    """A snapshot as the page reads it."""
    return msgspec.json.decode(msgspec.json.encode(snapshot(parts, NOW, PageQuery(**asked))))


def test_requests_are_told_with_their_reasons() -> None:
    async def test() -> None:
        async with canned_workers("a", "b") as workers, gateway(config_of(workers)) as found:
            for _ in range(5):
                await found.client.complete(stream=True)
            told = msgspec.json.decode(msgspec.json.encode(snapshot(found.running.parts, NOW, PageQuery())))
            assert [row["id"] for row in told["workers"]] == ["a", "b"]
            assert all(row["open"] and row["healthy"] and row["breaker"] == "closed" for row in told["workers"])
            assert told["pools"] == [{"name": "decode", "router": found.running.parts.pools["decode"].spec.router}]
            assert (told["decided"], len(told["decisions"])) == (5, 5)
            first = told["decisions"][0]
            assert set(first["scores"]) == {"a", "b"}
            assert first["reason"]
            assert first["candidates"] == 2
            one = shown(found.running.parts, worker="a")["decisions"]
            assert {row["worker"] for row in one} == {"a"}
            assert len(one) < 5
            assert shown(found.running.parts, pool="prefill")["decisions"] == []
            assert told["loop"]["running"] is False
            assert "No control loop" in told["loop"]["reason"]

    run(test)


def test_times_are_those_of_requests_that_ended() -> None:
    async def test() -> None:
        async with canned_workers("a") as workers, gateway(config_of(workers)) as found:
            for _ in range(3):
                await found.client.complete(stream=True)
            parts = found.running.parts
            parts.watcher.catch_up()
            newest = parts.watcher.recent._ring[-1]
            told = snapshot(parts, newest.number * parts.watcher.recent.bin_s, PageQuery())
            assert (told["minute"]["ended"], told["minute"]["failed"]) == (3, 0)
            assert told["series"]["ended"][-1] == 3
            assert told["series"]["ttft_ms"]["p50"][-1] > 0

    run(test)


def test_what_is_refused_is_no_failure_and_has_no_time() -> None:
    """A worker's refusal of a wrong request: the page says how many, apart from failures."""

    async def test() -> None:
        async with canned_workers("a", a=says(400)) as (a,), gateway(config_of([a])) as found:
            assert (await found.client.complete()).status == 400
            parts = found.running.parts
            parts.watcher.catch_up()
            newest = parts.watcher.recent._ring[-1]
            told = snapshot(parts, newest.number * parts.watcher.recent.bin_s, PageQuery())
            minute = told["minute"]
            assert (minute["ended"], minute["failed"], minute["refused"]) == (1, 0, 1)
            assert minute["ttft_ms"]["p50"] is None
            assert "1 ended in the last 60 s, 1 refused." in told["verdict"]
            assert found.metrics["coterie_gateway_ttft_seconds_count"] == 0

    run(test)


def test_the_largest_fleet_stays_within_bounds() -> None:
    async def test() -> None:
        ids = [f"{'w' * 120}{number}" for number in range(300)]
        entries = [WorkerEntry(id=id, url=f"http://127.0.0.1:{9}") for id in ids]
        parts = GatewayParts(GatewayConfig(workers=entries, health=FAST))
        for entry in entries[:2]:
            parts.add_worker(entry)
        for number in range(3000):
            scores = np.arange(300, dtype=np.float64)
            scores[:5] = math.inf
            decision = Decision(7, scores, "because " * 100)
            parts.decisions.add("r" * 500, "decode", ids[7], ids, decision, time_s=NOW + number)
        parts.control = ShownControl(full_view(text="\U0001f980" * 4000, items=5000))
        raw = msgspec.json.encode(snapshot(parts, NOW, PageQuery()))
        assert len(raw) < MOST_BYTES
        told = msgspec.json.decode(raw)
        assert len(told["decisions"]) == MOST_DECISIONS
        assert len(told["decisions"][0]["scores"]) == MOST_CANDIDATES
        assert ids[7][:128] in told["decisions"][0]["scores"], "the chosen one is among them"
        assert told["decisions"][0]["candidates"] == 300
        await parts.close()

    run(test)


def test_the_heat_map_is_cut_to_what_can_be_shown() -> None:
    async def test() -> None:
        parts = GatewayParts(GatewayConfig())
        assert heat(parts, None)["reason"].startswith("No control loop")
        parts.control = ShownControl(None)
        assert "not told" in heat(parts, "a")["reason"]
        loads = np.arange(300.0 * 1024).reshape(300, 1024)
        loads[0, 0] = 1e300
        maps = {"a": as_map(loads), "b": as_map(np.zeros((0, 4))), "c": as_map(np.zeros((1, 2 * MOST_CELLS)))}
        parts.control = ShownControl(ControlView(status={}, loads=maps))
        told = msgspec.json.decode(msgspec.json.encode(heat(parts, None)))
        assert (told["worker"], told["layers"], told["experts"]) == ("a", MOST_CELLS // 1024, 1024)
        assert told["values"] == [2**53, *range(1, MOST_CELLS)]
        assert told["layers_left_out"] == 300 - told["layers"]
        assert "has not told" in heat(parts, "b")["reason"]
        assert "has not told" in heat(parts, "gone")["reason"]
        assert (heat(parts, "c")["layers"], heat(parts, "c")["experts"]) == (1, MOST_CELLS)
        await parts.close()

    run(test)


@pytest.mark.parametrize(
    "broken",
    [
        {"advice": {"actions": "all", "before": [1], "after": {"balance": "x", "rank_s": "y"}}},
        {"advice": {"before": {"rank_s": [math.nan, "x", None, 1e-4]}, "gain_pct": math.inf, "actions": [1, None, {}]}},
        {"events": [{}, {"kind": None, "reason": 7, "values": [1], "at_s": "then"}]},
        {"status": {"job": [1], "drift_ratio": math.nan, 5: "x"}},
        {"loads": {"a": HeatMap(0, 0, b"[]")}},
    ],
)
def test_a_view_of_another_form_is_told_as_far_as_it_goes(broken: dict[str, Any]) -> None:
    async def test() -> None:
        parts = GatewayParts(GatewayConfig())
        parts.control = ShownControl(ControlView(**{"status": {}, **broken}))
        told = shown(parts)["loop"]
        assert told["running"] is True
        msgspec.json.encode(heat(parts, "a"))
        await parts.close()

    run(test)


def test_a_plan_is_to_be_applied_only_where_engines_can_take_it() -> None:
    async def told(*workers: WorkerEntry, **control: Any) -> tuple[bool, str | None]:
        parts = GatewayParts(GatewayConfig(control=ControlSection(**control)))
        for worker in workers:
            parts.add_worker(worker)
        parts.control = ShownControl(full_view())
        loop = shown(parts)["loop"]
        await parts.close()
        return loop["can_apply"], loop["to_apply"]

    async def test() -> None:
        alone = WorkerEntry(id="a", url="http://127.0.0.1:9")
        ranked = msgspec.structs.replace(alone, expert_events="tcp://127.0.0.1:9", placement_rank=0)
        assert await told(alone) == (False, None)
        both = "set control.apply to true, and control.map to the file that vLLM's policy loads"
        assert await told(ranked) == (True, both)
        assert await told(alone, map="map.json") == (True, "set control.apply to true")
        advise = AdviseSection(ranks=4)
        assert await told(alone, map="map.json", apply=True, advise=advise) == (True, None), "the loop does"

    run(test)


def test_a_comparison_is_told_while_no_turns_are_taken() -> None:
    async def test() -> None:
        async with canned_workers("a", "b") as workers, gateway(config_of(workers)) as found:
            parts = found.running.parts
            assert shown(parts)["no_turns"] == "the router is the shortest queue itself"
            parts.comparison = Comparison(NOW, "Routers are being compared. Recording: 3 of 49 requests.")
            assert " s. Routers are being compared. Recording: 3 of 49 requests. " in shown(parts)["verdict"]
            change = RouterChange(13.1, 14.7, -10.6, -14.4, -5.2)
            parts.comparison = Comparison(NOW, "Fewer experts: 10.6%; on this CPU 3%.", {"token_experts": change})
            told = shown(parts)
            assert told["comparison"]["changes"] == {"token_experts": change._asdict()}
            assert " s. Fewer experts: 10.6%. " in told["verdict"], "the panel has the rest"
            assert told["comparison"]["sentence"].endswith("on this CPU 3%.")
            await found.client.ask("PUT", "/routers/decode", {"router": "random"})
            parts.turn()
            assert shown(parts)["comparison"] is None, "turns tell of the router that is there now"

    run(test)


def test_experts_of_a_worker_are_those_of_a_layer() -> None:
    """The unit of the table of workers is that of what the router gains."""

    async def test() -> None:
        spec = RouterSpec("latency_aware", fit=str(tiny_fit_path()))
        parts = GatewayParts(GatewayConfig(workers=[WorkerEntry(id="a", url="http://127.0.0.1:9")], decode=spec))
        parts.add_worker(WorkerEntry(id="a", url="http://127.0.0.1:9"))
        keeper = parts.pools["decode"].keeper
        keeper.fleet.distinct[0] = 8 * 13.5
        assert shown(parts)["workers"][0]["experts"] == 13.5, "coterie-tiny has 8 layers"
        assert b'coterie_gateway_distinct_experts{worker="a"} 13.5' in parts.metrics.render()
        await parts.close()

    run(test)


def row(id: str, open: bool = True, running: int = 0) -> dict[str, Any]:
    return {"id": id, "open": open, "running": running}


@pytest.mark.parametrize(
    ("workers", "begin"),
    [
        ([], "The fleet has no workers"),
        ([row("a", running=1)], "The one worker is open and serves 1 request now"),
        ([row("a", running=3), row("b", running=4)], "All 2 workers are open and serve 7 requests now"),
        ([row("a"), row("b", open=False)], "1 of 2 workers are open (not b) and serve no request now"),
        ([row("a", open=False)], "None of 1 workers is open"),
    ],
)
def test_the_verdict_says_how_the_fleet_is(workers: list[dict[str, Any]], begin: str) -> None:
    said = verdict(workers, MINUTE, QUIET, None)
    assert said.startswith(begin)
    open = bool(workers) and all(one["open"] for one in workers)
    assert said.endswith("Nothing is to be done.") == open
    assert ("To do: " in said) != open


def test_the_verdict_says_what_happened_and_what_is_to_be_done() -> None:
    def told(*kinds: str, state: str = "advised", can_apply: bool = True) -> dict[str, Any]:
        events = [{"kind": kind, "reason": "0.23% in 8 pieces"} for kind in kinds]
        to_apply = "set control.apply to true" if can_apply else None
        return {"events": events, "advice": {"state": state}, "can_apply": can_apply, "to_apply": to_apply}

    minute = {**MINUTE, "ended": 9, "failed": 2, "refused": 3, "ttft_ms": {"p50": 1234.0}, "tpot_ms": {"p50": 4.567}}
    turns = {"router": "latency_aware", "pairs": 12, "verdict": "TPOT is 6.3% lower than by the shortest queue"}
    said = verdict([row("a")], minute, told("drift", "refit_taken", "no_drift"), turns)
    assert (
        "9 ended in the last 60 s, 2 of them without an answer, 3 refused (medians: TTFT 1.23 s, TPOT 4.57 ms)." in said
    )
    assert "With latency_aware: TPOT is 6.3% lower" in said
    assert said.endswith("The router was fitted anew to the present traffic. Nothing is to be done.")
    assert "pieces" not in said
    assert len(said) < 500
    made = verdict([row("a")], MINUTE, told("plan_made"), None)
    assert made.endswith("To do: set control.apply to true: the plan is under Placement.")
    for kind in ("plan_made", "plan_kept"):
        nowhere = verdict([row("a")], MINUTE, told(kind, can_apply=False), None)
        assert nowhere.endswith("none ended in the last 60 s. Nothing is to be done.")
    by_loop = {**told("plan_made"), "to_apply": None}
    said = verdict([row("a")], MINUTE, by_loop, None)
    assert said.endswith("Moving experts would save time. Nothing is to be done."), "the loop writes the plan"
    assert verdict([row("a")], MINUTE, told("plan_made", state="pending"), None).endswith("Nothing is to be done.")
    assert "To do: look after a; read why" in verdict([row("a", open=False)], MINUTE, told("refit_failed"), None)
    for kind in CHANGES:
        assert kind in KINDS, "the loop has such an event"
